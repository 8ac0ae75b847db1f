"""A copy of a model with tokens that its tokenizer lacks (`model.add_tokens`), or scaled rotary
positions (`model.rope_scaling`).

The tokens' rows of embedding and head begin as the mean of the others, as in Transformers but
without its noise of 1e-9. They follow the tokenizer's last token, in free or new rows.
`config.json` names them (`TRAINED_ROWS`) for the training. All else is copied as stored. Without
new tokens, weights are symbolic links to the files of the model."""

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.config_file import text_part, with_infinities
from workflow.lib.checkpoints.files.model_files import CONFIG, WEIGHTS
from workflow.lib.checkpoints.files.safetensors_headers import INDEX
from workflow.lib.checkpoints.meta_model import is_tied
from workflow.lib.export.adapter_files import write_merged, write_tokenizer
from workflow.lib.model.host_embedding import other_tables
from workflow.lib.model.lora import TRAINED_ROWS
from workflow.lib.quantization.nf4_checkpoint import copy_companions
from workflow.lib.settings.config import ExportConfig, ModelConfig
from workflow.lib.settings.train import RopeScaling
from workflow.lib.system.checksums import HUB_RECORD, read_artifact
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, write_checked_json, write_json

FULL_ATTENTION = "full_attention"
ORIGINAL, CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
# Methods that another one replaces; others are of a family.
REPLACED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
KEYS = {"type", "short_factor", "long_factor", "attention_factor"} | {*RopeScaling.model_fields}


def with_scaling(config: Mapping[str, Any], scaling: RopeScaling) -> dict[str, Any]:
    """Return a config.json with other rotary positions and their context. Layers of sliding
    windows, where they have parameters of their own, keep these: a window is no longer than before.

    Raises `UserError` for a model without rotary positions that Transformers scales, or a context
    that is not longer than the model's own."""
    text: Any = _parsed(config).get_text_config()
    parameters = copy.deepcopy(getattr(text, "rope_parameters", None) or {})
    own = parameters.get(FULL_ATTENTION, parameters)
    if (kind := own.get("rope_type")) not in REPLACED:
        kinds = f"of a kind of its own ({kind})" if kind else "not of one kind"
        raise not_scaled(scaling, f"{text.model_type} has rotary positions {kinds}, or none")
    own_context = text.max_position_embeddings
    original = scaling.original_max_position_embeddings or _unscaled_context(own, own_context)
    context = scaling.context(original)
    if context <= own_context:
        reason = f"{original} tokens x factor must be above the model's {CONTEXT} = {own_context}"
        change = f"Set it above {own_context / original:g}"
        raise _scaling_error("factor", scaling.factor, reason, change)
    scaled = {key: value for key, value in own.items() if key not in KEYS} | scaling.parameters
    if scaling.rope_type != "linear":
        scaled[ORIGINAL] = original
    several = own is not parameters
    copied = copy.deepcopy(dict(config))
    part = text_part(copied)
    part.pop("rope_scaling", None)  # an older name of the parameters
    part["rope_parameters"] = parameters | {FULL_ATTENTION: scaled} if several else scaled
    part[CONTEXT] = context
    try:
        _parsed(copied)
    except (KeyError, TypeError, ValueError) as error:
        message = str(error).strip().splitlines()[-1].strip()
        raise not_scaled(scaling, f"{text.model_type} does not take it ({message})") from None
    return copied


def _parsed(config: Mapping[str, Any]) -> PretrainedConfig:
    kind = CONFIG_MAPPING[config["model_type"]]
    return kind.from_dict(copy.deepcopy(with_infinities(dict(config))))


def scaled_context(config: Mapping[str, Any], scaling: RopeScaling) -> int:
    """Return the context in tokens of a model with this config.json, once it is scaled; raises as
    `with_scaling`."""
    return int(text_part(with_scaling(config, scaling))[CONTEXT])


def _unscaled_context(own: Mapping[str, Any], context: int) -> int:
    """Return the context of a model without its own scaling."""
    if own["rope_type"] in ("default", "dynamic"):
        return context
    return round(context / own["factor"]) if own["rope_type"] == "linear" else int(own[ORIGINAL])


def not_scaled(scaling: RopeScaling, reason: str) -> UserError:
    """Return the refusal of a model whose positions cannot be scaled."""
    return _scaling_error("rope_type", scaling.rope_type, reason, "Remove model.rope_scaling")


def _scaling_error(key: str, value: object, reason: str, change: str) -> UserError:
    return setting_error(f"model.rope_scaling.{key}", value, reason, change)


CARD = "README.md"


def write_copy(source: Checkpoint, folder: Path, settings: ModelConfig) -> range:
    """Write the model `source` with the settings' tokens and positions to a new `folder`; return
    the tokens' ids. Raises `UserError` for a token that the tokenizer has, a model whose rows
    cannot be trained, or as `with_scaling`."""
    config = copy.deepcopy(source.config)
    if settings.rope_scaling.parameters:
        config = with_scaling(source.config, settings.rope_scaling)
    if settings.add_tokens:
        added = _write_with_tokens(source, folder, settings.add_tokens, config)
    else:
        added = range(0)
        for path in {*source.files, *source.folder.glob(f"*{INDEX.removeprefix('model')}")}:
            (folder / path.name).symlink_to(path.resolve())
        copy_companions(source.folder, folder)
        write_json(folder / CONFIG, config)
    if (source.folder / CARD).is_file():  # it names the licence
        shutil.copyfile(source.folder / CARD, folder / CARD)
    if settings.rope_scaling.parameters:
        _check_rotary(Checkpoint(folder), settings.rope_scaling)
    _write_record(source, folder)
    return added


def _check_rotary(copy: Checkpoint, scaling: RopeScaling) -> None:
    """Raise `UserError` unless the model's layers use these positions."""
    kinds = [getattr(module, "rope_type", None) for module in copy.model.modules()]
    used = {
        name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])
    }
    if scaling.rope_type not in used:
        raise not_scaled(scaling, "the model's layers use no rotary positions that it scales")


def _write_with_tokens(
    source: Checkpoint, folder: Path, tokens: Sequence[str], config: dict[str, Any]
) -> range:
    tokenizer = source.tokenizer()
    added = _add_tokens(tokenizer, tokens)
    embedding, head = _tables(source.model, tokens)
    old_rows = source.model.get_parameter(embedding).shape[0]
    if added.start > old_rows:
        raise _error(tokens, f"the model has {old_rows} rows for {added.start} tokens already")
    rows = max(old_rows, added.stop)
    missing = {embedding, head}
    dropped = head if is_tied(source.model) else None  # the same rows again

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for stored in reader.names():
            name, tensor = source.names.of(stored), reader.tensor(stored)
            if name in missing and tensor.dtype.itemsize > 1:
                missing.discard(name)
                tensor = _with_rows(tensor, added, rows)
            if name != dropped:
                yield stored, tensor

    with source.stored(recorded=True) as reader:
        write_merged(tensors(), source, folder, settings=ExportConfig())
    if missing - {dropped}:
        raise _error(tokens, f"{min(missing)} is stored packed, where no row can be added")
    write_tokenizer(tokenizer, folder)
    _write_config(config, folder, rows, added)
    return added


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> range:
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token in vocabulary:
            reason = f"the tokenizer has this token already, with the id {vocabulary[token]}"
            raise setting_error("model.add_tokens", token, reason, "Remove it from the list")
    added = range(len(tokenizer), len(tokenizer) + len(tokens))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    if tokenizer.convert_tokens_to_ids([*tokens]) != [*added]:
        raise _error(tokens, f"the tokenizer's ids have gaps, and do not go on at {added.start}")
    return added


def _tables(model: PreTrainedModel, tokens: Sequence[str]) -> list[str]:
    """Return the names of embedding and head."""
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if tables[1].bias is not None:
        raise _error(tokens, "the model's output head has a bias, which PEFT leaves out")
    if other_tables(model):
        raise _error(tokens, "the model's layers have tables of tokens of their own")
    paths = {module: path for path, module in model.named_modules()}
    return [f"{paths[table]}.weight" for table in tables]


def _error(tokens: Sequence[str], reason: str) -> UserError:
    change = "Set it to [], or choose another model.source"
    return setting_error("model.add_tokens", [*tokens], reason, change)


def _with_rows(table: torch.Tensor, added: range, rows: int) -> torch.Tensor:
    """Return a table (old rows, width) with `rows` rows, those of `added` the mean of the first."""
    extended = torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])
    mean = table[: added.start].mean(dim=0, dtype=torch.float64)
    extended[added.start : added.stop] = mean.to(table.dtype)
    return extended


def _write_config(config: dict[str, Any], folder: Path, rows: int, added: range) -> None:
    config.pop(WEIGHTS, None)  # a file that this folder has not
    text_part(config)["vocab_size"] = rows
    if "vocab_size" in config:  # multimodal models have it twice
        config["vocab_size"] = rows
    write_json(folder / CONFIG, config | {TRAINED_ROWS: [added.start, added.stop]})


def _write_record(source: Checkpoint, folder: Path) -> None:
    """Write a download's record: its origin, if `source` is one, and the SHA-256 of all files."""
    origin = read_artifact(source.folder / HUB_RECORD) if source.recorded else {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [{"path": str(p.relative_to(folder)), "sha256": file_sha256(p)} for p in paths]
    write_checked_json(folder / HUB_RECORD, origin | {"files": files})

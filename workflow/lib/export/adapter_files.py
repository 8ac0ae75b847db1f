"""From the sharded adapter to PEFT's adapter, and optionally a merged model.

PEFT's adapter is the folder that PEFT, Transformers and servers load: weights, configuration,
tokenizer with its chat template, generation settings, checksums. The merged model is streamed by
tensor. A server must prompt as in training, so both hold its
tokenizer, chat template and end tokens, and `check_conversations` proves it."""

import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoded_reader import DecodedReader
from workflow.lib.checkpoints.files.config_file import read_settings
from workflow.lib.checkpoints.files.stack_names import PREFIX
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.checkpoints.tokenizer import (
    DEFAULT_TEMPLATE,
    NAMED_TEMPLATES,
    load_tokenizer,
    trained_templates,
)
from workflow.lib.data.encoding.chat_template import with_fixed_date
from workflow.lib.data.reading.hub_download import MANIFEST
from workflow.lib.distributed.sharded_files import DamagedError, read_whole
from workflow.lib.export.packed_stacks import (
    adapted_paths,
    exported_config,
    merged_stacks,
    without_stacks,
)
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.model.architecture.adapter_targets import adapter_scale
from workflow.lib.model.architecture.routers import CORRECTION
from workflow.lib.model.lora import ROWS_TENSOR, TRAINED_ROWS
from workflow.lib.quantization.nf4_checkpoint import ShardWriter, copy_companions
from workflow.lib.settings.config import ExportConfig, ModelConfig, RunConfig, is_hub_id
from workflow.lib.system.checksums import read_artifact
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import atomic_path, write_checksums, write_json, write_text

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
# The adapter's folder has the same files for every run; without a template conversations fail.
NO_TEMPLATE = "{{ raise_exception('The model was trained without a chat template.') }}"


def read_sharded_adapter(
    folder: Path, *, below: str = "", may_be_zero: bool = False
) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder of shards whole, on the CPU, by PEFT's name (stored after
    `below`). Local. Raises `UserError` if it is damaged, not finite, or without effect (every B
    zero) unless it `may_be_zero`."""
    try:
        tensors = read_whole(folder, below=below)
    except (OSError, DamagedError) as error:
        raise UserError(
            f"the sharded adapter in {folder} cannot be read ({error}). Delete the folder "
            f"{folder} and repeat the command; training continues from its last checkpoint."
        ) from None
    check_adapter(tensors, may_be_zero=may_be_zero)
    return tensors


def check_adapter(tensors: dict[str, torch.Tensor], *, may_be_zero: bool = False) -> None:
    if not tensors:
        raise UserError("the sharded adapter has no tensors. Train again.")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"adapter tensor {name} is not finite. Lower train.learning_rate and train again."
            )
    if not may_be_zero and not any(
        tensor.any() for name, tensor in tensors.items() if ".lora_B." in name
    ):
        raise UserError(
            "every B of the adapter is zero: it changes nothing. Train longer (train.max_steps)."
        )


def save_adapter(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config)


def with_corrections(
    adapter: dict[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    model: PreTrainedModel,
    base: CheckpointReader,
) -> dict[str, torch.Tensor]:
    """Return an adapter with all of PEFT's tensors of whole modules: a router's correction, without
    gradient, is the base's. model: the original on meta; base: its NF4 checkpoint."""
    kept = dict(adapter)
    names = tuple(f".{name}" for name in config.get("modules_to_save") or ())
    for path, module in model.named_modules():
        for name in module.state_dict() if f".{path}".endswith(names) and names else ():
            key = f"{PREFIX}{path}.{name}"
            if key not in kept:
                assert name.endswith(CORRECTION), f"{key} was to be trained"
                kept[key] = base.tensor(f"{path}.{name}")
    return kept


def base_reference(
    settings: ModelConfig, folder: Path, *, export: ExportConfig
) -> dict[str, str | None]:
    """Return the base in `folder` for PEFT's configuration: `export.nf4_base_id`; else repository
    and commit of a hub model; else `export.base_id`, or without it the absolute path, as PEFT
    resolves a relative one from its working folder."""
    if export.nf4_base_id is not None:
        return {"base_model_name_or_path": export.nf4_base_id, "revision": None}
    if not is_hub_id(settings.source):
        name = export.base_id or str(Path(settings.source).absolute())
        return {"base_model_name_or_path": name, "revision": None}
    record = folder / MANIFEST
    commit = read_artifact(record)["commit"] if record.is_file() else settings.revision
    return {"base_model_name_or_path": settings.source, "revision": commit}


def save_tokenizer(source: Path, folder: Path, *, facts: ConversationFacts) -> None:
    """Write the tokenizer in `source` with the trained template: Transformers' three files."""
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = trained_templates(tokenizer, facts.chat_template) or NO_TEMPLATE
    write_tokenizer(tokenizer, folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer without its options of loading here."""
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)


def replace_chat_template(folder: Path, *, facts: ConversationFacts) -> None:
    """Replace the base's own template by the trained one in the copied files of a tokenizer."""
    if facts.chat_template is None:
        return
    templates = trained_templates(load_tokenizer(folder), facts.chat_template)
    shutil.rmtree(folder / NAMED_TEMPLATES, ignore_errors=True)
    for name, text in templates.items() if isinstance(templates, dict) else ():
        if name != DEFAULT_TEMPLATE:
            (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
            write_text(folder / NAMED_TEMPLATES / f"{name}.jinja", text)
    write_text(folder / CHAT_TEMPLATE, facts.chat_template)
    (folder / "chat_template.json").unlink(missing_ok=True)
    replace_in_config(folder, facts.chat_template)


def replace_in_config(folder: Path, template: str) -> None:
    """Replace the template in a tokenizer's settings and a processor's, where they have it, and a
    link by a file."""
    for path in (folder / "tokenizer_config.json", folder / "processor_config.json"):
        config = read_settings(path) if path.is_file() else {}
        if "chat_template" in config:
            path.unlink()
            write_json(path, config | {"chat_template": template})


def write_generation_config(source: Checkpoint, folder: Path, *, facts: ConversationFacts) -> None:
    """Write the base's generation settings, with end tokens of base, tokenizer and template."""
    path = source.folder / GENERATION_CONFIG
    settings = read_settings(path) if path.is_file() else {}
    # With this mark, Transformers may read the end tokens from config.json instead.
    settings.pop("_from_model_config", None)
    special = {"bos_token_id": facts.bos_token_id, "pad_token_id": facts.pad_token_id}
    ends = {"eos_token_id": end_token_ids(source, facts)}
    write_json(folder / GENERATION_CONFIG, special | settings | ends)


def end_token_ids(source: Checkpoint, facts: ConversationFacts) -> list[int]:
    """Return the tokens that end an answer: of model, tokenizer and template."""
    path = source.folder / GENERATION_CONFIG
    settings = read_settings(path) if path.is_file() else {}
    named = settings.get("eos_token_id", source.config.get("eos_token_id"))
    ends = {*(named if isinstance(named, list) else [named]), facts.eos_token_id}
    return sorted({*ends, *facts.end_of_turn_token_ids} - {None})


def check_conversations(folder: Path, probes: list[Probe]) -> None:
    """Raise `UserError` unless stock Transformers, given `folder`, writes all probes as trained."""
    tokenizer = load_tokenizer(folder)
    for probe in probes:
        if (ids := _written(tokenizer, probe)) != probe.ids:
            raise UserError(
                f"the tokenizer exported to {folder} writes {probe.described} as "
                f"{tokenizer.decode(ids)!r}, but trained was {tokenizer.decode(probe.ids)!r} (or "
                "the same text in other tokens). Nothing is exported. If model.source or "
                "Transformers has changed since the tokens were made, delete their folder and "
                "repeat the command."
            )


def _written(tokenizer: PreTrainedTokenizerBase, probe: Probe) -> list[int]:
    written: Any  # its declared type depends on options
    if probe.messages is None:
        written = tokenizer(probe.text, add_special_tokens=False)
    else:
        tools: Any = probe.tools
        template = with_fixed_date(tokenizer.get_chat_template(tools=tools))
        written = tokenizer.apply_chat_template(
            probe.messages, tools=tools, chat_template=template, return_dict=True
        )
    ids: list[int] = written["input_ids"]
    return ids


def merged_tensors(
    adapter: dict[str, torch.Tensor],
    adapter_config: dict[str, Any],
    *,
    original: CheckpointReader,
    nf4: DecodedReader,
    onto: str,
    others: Collection[str] = (),
    stacks: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and bf16 tensor of the merged model: `merged_weight` for adapted ones, a module's
    own if it was trained whole, or some of its rows were.

    original: by names of the model (`ConvertedReader`); the yielded names are its files'. Left out
    are `stacks` of experts (`merged_stacks`), and the modules `others`, which text never passes
    (`ConvertedReader.untrained`). onto: `dequantized` (the trained weights) or `original`. The sum
    is in fp32, rounded once. Unquantized tensors stay in fp32 in a 16-bit checkpoint. Raises
    `UserError` if an adapter belongs to no tensor of the model."""
    pending = {name.removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name}
    whole = {name for name in adapter if ".lora_" not in name}
    indices: dict[str, list[int]] = adapter_config.get("trainable_token_indices") or {}
    outside = tuple(f"{path}." for path in others)
    narrow = any(original.dtype(name) in ("BF16", "F16") for name in original.names())
    for name in original.names():
        if name.startswith(outside) or name in stacks:
            continue
        path = name.removesuffix(".weight")
        key = f"{PREFIX}{path}"
        quantized = nf4.in_few_bits(name)
        kept = narrow and original.dtype(name) == "F32"  # a router's bias needs its digits
        kept = kept and not quantized
        if f"{PREFIX}{name}" in whole:
            whole.discard(f"{PREFIX}{name}")
            weight = adapter[f"{PREFIX}{name}"]
        elif path in indices:
            rows = adapter[f"{key}.{ROWS_TENSOR}"].to(torch.bfloat16)
            whole.discard(f"{key}.{ROWS_TENSOR}")
            table = original.tensor(name).to(rows.dtype)
            weight = table.index_copy(0, torch.tensor(indices[path]), rows)
        elif quantized and onto == "dequantized":
            weight = decoded(*nf4.nf4_weight(name))
        else:
            weight = original.tensor(name)
        if key in pending and path != name:
            pending.discard(key)
            scale = adapter_scale(adapter_config, path)
            weight = merged_weight(weight.float(), adapter, key, scale=scale)
        rounded = weight.is_floating_point() and not kept
        yield from original.parts(name, weight.to(torch.bfloat16) if rounded else weight)
    if pending | whole:
        raise UserError(
            f"the adapter has tensors for {min(pending | whole)}, which the model has not. Check "
            "model.source."
        )


def merged_weight(
    weight: torch.Tensor, adapter: dict[str, torch.Tensor], key: str, *, scale: float
) -> torch.Tensor:
    """Return W + s B A (out, in) fp32 for PEFT's linear `key`; with DoRA rescaled by row."""
    a_weight, b_weight = (adapter[f"{key}.lora_{part}.weight"].float() for part in "AB")
    total = weight + scale * (b_weight @ a_weight)
    magnitude = adapter.get(f"{key}.lora_magnitude_vector")
    if magnitude is None:
        return total
    factor: torch.Tensor = magnitude / torch.linalg.vector_norm(total, dim=1)
    return total * factor[:, None]


def merged_model(
    adapter: dict[str, torch.Tensor],
    adapter_config: dict[str, Any],
    *,
    original: Checkpoint,
    base: Checkpoint,
    onto: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all files of the merged model, parts without text included.
    adapter: by names in training; onto: as in `merged_tensors`."""
    stacks, others = original.stacks, original.other_parts
    with original.weights(recorded=True) as weights, base.decoded() as nf4:
        how: dict[str, Any] = {"original": weights, "nf4": nf4, "onto": onto, "stacks": stacks}
        linears = without_stacks(adapter, stacks)
        yield from merged_tensors(linears, adapter_config, others=others, **how)
        yield from merged_stacks(adapter, adapter_config, **how)
        yield from weights.untrained(others)


def write_merged(
    tensors: Iterator[tuple[str, torch.Tensor]],
    source: Checkpoint,
    folder: Path,
    *,
    settings: ExportConfig,
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, shard_bytes=int(settings.shard_gib * 2**30))
    for name, tensor in tensors:
        writer.add({name: tensor.contiguous()})
    writer.close()
    copy_companions(source.folder, folder)
    config = source.plain_config | {"dtype": "bfloat16"}
    config.pop(TRAINED_ROWS, None)  # a training on it has its own
    write_json(folder / "config.json", config)
    return writer.total_bytes


logger = logging.getLogger("workflow")


class Trained(NamedTuple):
    """An adapter in the names of the training, and its `adapter_config.json`."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def write_peft_folder(
    trained: Trained,
    folder: Path,
    config: RunConfig,
    *,
    model: Checkpoint,
    base: Checkpoint,
    facts: ConversationFacts,
) -> Adapter:
    """Write the adapter of `base` to `folder`. Raises `UserError` if its tokenizer does not write
    conversations as trained."""
    reference = base_reference(config.model, model.folder, export=config.export)
    whole = Trained(trained.tensors, trained.config | reference)
    save_exported(whole, folder, original=model, base=base)
    save_tokenizer(model.folder, folder, facts=facts)
    write_generation_config(model, folder, facts=facts)
    check_conversations(folder, facts.probes)
    write_checksums(folder)
    return Adapter(folder)


def save_exported(
    adapter: Trained,
    folder: Path,
    *,
    original: Checkpoint,
    base: Checkpoint,
) -> None:
    """Write weights and configuration for stock PEFT."""
    names = original.names.peft(adapted_paths(adapter.tensors))
    with base.stored() as reader:
        tensors = with_corrections(
            adapter.tensors, adapter.config, model=original.model, base=reader
        )
        save_adapter(
            {names.exported(name): tensor for name, tensor in tensors.items()},
            exported_config(adapter.config, original.names, adapter.tensors),
            folder,
        )

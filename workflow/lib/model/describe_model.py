"""The description of a model (`architecture.model_shape`), from a run of its Transformers class on
meta, with tokens without values (`description`).

Unsupported models are refused by name. Of a multimodal model only the decoder is described."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from workflow.lib.checkpoints.checkpoint import Checkpoint, check_loading, first_weight
from workflow.lib.checkpoints.converted_reader import ModuleNames
from workflow.lib.checkpoints.decoder_layers import decoder_layers, drop_other_parts_
from workflow.lib.checkpoints.files.attention_needs import attention_dropout
from workflow.lib.checkpoints.files.config_file import (
    check_bounds,
    read_bounded,
    text_part,
    with_infinities,
)
from workflow.lib.checkpoints.files.quantization_settings import QUANTIZATION, without_quantization
from workflow.lib.checkpoints.files.safetensors_headers import (
    FLOAT_BYTES,
    read_headers,
    zeros_at_end,
)
from workflow.lib.checkpoints.meta_model import (
    build_config_on_meta,
    is_built,
    is_tied,
    quiet_transformers,
    said_by,
)
from workflow.lib.model.architecture.model_shape import Linear, ModelShape
from workflow.lib.model.description import RECORDER, described_layers, recorded_layers
from workflow.lib.model.experts.router_balance import family_coefficient
from workflow.lib.model.host_embedding import other_tables
from workflow.lib.model.kernel_packages import compute_by_torch_code
from workflow.lib.model.layers.rotary_by_document import rotates_by_length
from workflow.lib.model.loss.tried_head import tried_head
from workflow.lib.model.nf4_model import say_quantized_
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256
from workflow.lib.system.number_formats import listed_names

# Sizes that a config.json must say itself: defaults of the class belong to another model.
WIDTH = "intermediate_size"
NEEDED = (
    "hidden_size",
    WIDTH,
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Keys in place of such a size: a list, or a string, of layers; the width of experts.
IN_PLACE_OF = {
    "num_hidden_layers": ("layers_block_type", "hybrid_override_pattern"),
    WIDTH: ("moe_intermediate_size",),
}
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of classes' names
# Exceptions of Transformers for settings that no model can have.
UNBUILDABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    StrictDataclassError,
)
STORED = {"float32": "F32", "float16": "F16"}

logger = logging.getLogger("workflow")


def describe_file(path: Path) -> ModelShape:
    """Describe the model of a config.json; raises `UserError` as `describe_config` does."""
    shape = describe_config(read_bounded(path), origin=path)
    return replace(shape, config_sha256=file_sha256(path))


def describe_checkpoint(checkpoint: Checkpoint) -> ModelShape:
    """Describe a model, its tensors included, as Transformers loads it; raises `UserError` as
    `describe_config` and `check_loading` do. Logs tensors that are not loaded."""
    folder = checkpoint.folder
    if checkpoint.stated_quantization and not checkpoint.is_packed:
        message = (
            "%s speaks of quantization (%s), but no weights beside it are packed: it is ignored"
        )
        logger.warning(message, checkpoint.config_path, QUANTIZATION)
    _check_generation(folder)
    shape = describe_config(checkpoint.config, origin=checkpoint.config_path)
    for path in checkpoint.files:
        _check_end(path, checkpoint.names)
    with checkpoint.weights() as reader:
        left = check_loading(reader)
        dtype = reader.dtype(first_weight(checkpoint.model))
    if left.stored:
        logger.log(
            logging.WARNING if left.unexpected else logging.INFO,
            "%s: the model has no part for %d tensors of the checkpoint (%s first), which are not "
            "trained, and are copied into a merged model as they are%s",
            folder, len(left.stored), left.stored[0],
            f"; Transformers {transformers.__version__} does not say so of {left.unexpected[0]}"
            if left.unexpected else "",
        )  # fmt: skip
    return replace(
        shape,
        config_sha256=file_sha256(checkpoint.config_path),
        source_dtype=dtype if dtype in FLOAT_BYTES else "BF16",
        tied_embeddings=is_tied(checkpoint.model),
        left_tensors=len(left.stored),
    )


def _check_end(path: Path, names: ModuleNames) -> None:
    """Raise `UserError` if a matrix of the decoder layers is in zeros at a file's end. Tables may
    have unused rows."""
    sizes = read_headers([path])
    layers = f"{_paths(names.model)['layers']}."
    zeros = zeros_at_end(path)
    if any(len(sizes[name].shape) > 1 and names.of(name).startswith(layers) for name in zeros):
        raise UserError(
            f"{path} ends in zeros, in {len(zeros)} of its {len(sizes)} tensors "
            f"({listed_names(zeros, limit=3)}): a copy or download of it broke off. Download or "
            "copy it again."
        )


def _check_generation(folder: Path) -> None:
    """Raise `UserError` for settings of generation that Transformers refuses, with the model."""
    path = folder / GENERATION_CONFIG_NAME
    try:
        if path.is_file():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, *UNBUILDABLE) as error:
        raise UserError(
            f"{path}: Transformers {transformers.__version__} cannot read it "
            f"({said_by(error)}). Correct it, or remove it from a copy of the folder."
        ) from None


def describe_config(config: dict[str, Any], *, origin: Path) -> ModelShape:
    """Describe the model of a config.json (bf16 unless it says otherwise), which `origin` names.
    Raises `UserError` if it is no causal LM, cannot be built, or has unknown parts. This process
    then computes recurrent layers by torch code."""
    compute_by_torch_code()
    config = without_quantization(config, origin)
    part = text_part(config)
    for content in (config, part):
        check_bounds(content, origin)
    _check_class(config, origin)
    try:
        with quiet_transformers():
            whole = _whole_config(config, part, origin)
            model = build_config_on_meta(whole, dtype=torch.bfloat16)
            try:
                drop_other_parts_(model)
                say_quantized_(model)
                dtype = str(config.get("dtype", config.get("torch_dtype", "bfloat16")))
                return _shape(model, dtype=dtype)
            except UserError as error:
                raise UserError(f"{origin}: model_type = {whole.model_type!r}: {error}") from None
            except UNBUILDABLE as error:
                raise UserError(
                    f"{origin}: model_type = {whole.model_type!r}: its decoder does not run on "
                    f"token ids and a mask of documents (Transformers {transformers.__version__}: "
                    f"{said_by(error)}). Check that config.json belongs to the checkpoint, or "
                    "choose another model.source."
                ) from None
    except UserError:
        raise
    except UNBUILDABLE as error:
        raise UserError(
            f"{origin} does not describe a model that Transformers {transformers.__version__} can "
            f"build ({said_by(error)}). Check model.source."
        ) from None


def _check_class(config: dict[str, Any], origin: Path) -> None:
    """Raise `UserError` for a model that is no causal language model of Transformers."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise UserError(
                f"{origin}: model_type = {name!r} is code of the model's own repository "
                "(auto_map), which is never run. Choose a model.source that Transformers knows."
            )
        raise UserError(
            f"{origin}: model_type = {name!r}: Transformers {transformers.__version__} knows no "
            "such model. Check model.source, or install a newer Transformers."
        )
    if config.get("is_encoder_decoder") or CONFIG_MAPPING[name].is_encoder_decoder:
        raise UserError(
            f"{origin}: model_type = {name!r} is an encoder-decoder, and this workflow trains "
            "decoders. Choose a causal language model as model.source."
        )
    architectures = config.get("architectures")
    classes = [str(one) for one in architectures] if isinstance(architectures, list) else []
    if classes and not any(one.endswith(CAUSAL) for one in classes):
        raise UserError(
            f"{origin}: architectures = {classes}: this is no causal language model by the name of "
            f"its class ({', '.join(CAUSAL)}). Choose one as model.source."
        )


def _whole_config(config: dict[str, Any], part: dict[str, Any], origin: Path) -> PretrainedConfig:
    """Return the configuration as Transformers completes it; part: the decoder's."""
    kind = CONFIG_MAPPING[config["model_type"]]
    inner = kind.sub_configs.get("text_config", kind) if part is not config else kind
    aliases = getattr(inner, "attribute_map", {})
    for key in NEEDED:
        if any(part.get(name) for name in IN_PLACE_OF.get(key, ())):
            continue
        if part is not config and key not in part:
            continue  # published multimodal models leave it to the class
        if key == WIDTH and key not in aliases and not hasattr(inner, key):
            continue  # of OPT it is `ffn_dim`, and GPT-J takes four times the hidden size
        _check_size(key, part.get(key, part.get(aliases.get(key, key))), origin)
    heads, hidden = part.get("num_attention_heads"), part.get("hidden_size")
    if part.get("head_dim") is None and heads and hidden and heads > hidden:
        raise UserError(
            f"{origin}: num_attention_heads = {heads}: must be at most hidden_size = {hidden}. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )
    whole = kind.from_dict(with_infinities(config))
    if not is_built(whole):
        raise UserError(
            f"{origin}: model_type = {whole.model_type!r}: Transformers {transformers.__version__} "
            "has no causal language model of this type. Choose another model.source."
        )
    tie = "tie_word_embeddings"
    if part.get(tie) is False and tie not in config:
        whole.tie_word_embeddings = False  # both tables are stored, and Transformers keeps both
    return whole


def _check_size(key: str, value: Any, origin: Path) -> None:
    if isinstance(value, list) and value:  # one for each layer
        for one in value:
            _check_size(key, one, origin)
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"{origin}: {key} = {value!r}: must be a whole number above 0. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )
    check_bounds({key: value}, origin)


def _shape(model: PreTrainedModel, *, dtype: str) -> ModelShape:
    config: Any = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or []
    paths = _paths(model)
    _check_own_weights(model, layers=paths["layers"])
    by_length = any(map(rotates_by_length, model.modules()))
    layers = recorded_layers(model)  # replaces rotary embeddings
    if any(calls.hidden_dims != 3 for calls in layers):
        raise UserError(
            "its decoder layers take several streams of hidden states, which is not supported. "
            "Choose another model.source."
        )
    _check_names(model)
    described = described_layers(model, layers)
    kinds = list(dict.fromkeys(described))
    return ModelShape(
        family=config.model_type,
        kinds=tuple(kinds),
        order=tuple(kinds.index(kind) for kind in described),
        hidden_size=kinds[0].hidden_size,
        vocab_size=model.get_parameter(f"{paths['embedding']}.weight").shape[0],
        max_position_embeddings=config.max_position_embeddings,
        tied_embeddings=is_tied(model),
        logit_softcap=tried_head(model).softcap is not None,
        attention_masks=1 + any("sliding" in x or "chunked" in x for x in types),
        **(paths | _others(model, paths)),
        source_dtype=STORED.get(dtype.removeprefix("torch."), "BF16"),
        attention_dropout=attention_dropout(config.to_dict()),
        router_aux_loss_coef=family_coefficient(model),
        masked=any(RECORDER not in x.arguments for calls in layers for x in calls.attended),
        rotates_by_length=by_length,
    )


def _check_own_weights(model: PreTrainedModel, *, layers: str) -> None:
    """Raise `UserError` if decoder layers share weights (Zamba): they are sharded one by one."""
    owners: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name.startswith(f"{layers}."):
            number = name.removeprefix(f"{layers}.").partition(".")[0]
            if owners.setdefault(id(param), number) != number:
                raise UserError(
                    f"its decoder layers {owners[id(param)]} and {number} share weights ({name}), "
                    "which is not supported. Choose another model.source."
                )


def _check_names(model: PreTrainedModel) -> None:
    """Raise `UserError` if stock PEFT would not find an adapter under its name."""
    names = ModuleNames(model)
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if isinstance(module, torch.nn.Linear) and names.loaded_as(name) != name:
            raise UserError(
                f"an adapter on {path} could not be loaded again: Transformers "
                f"{transformers.__version__} renames it to "
                f"{names.loaded_as(name).removesuffix('.weight')} on loading, which the model has "
                "not. Choose another model.source."
            )


def _paths(model: PreTrainedModel) -> dict[str, str]:
    """Return the paths of embedding, head and decoder layers."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
        raise UserError(
            "its embedding or its output head is of a kind that is not known. Choose another "
            "model.source."
        )
    modules = {module: path for path, module in model.named_modules()}
    first = modules[decoder_layers(model)[0]]
    return {
        "embedding": modules[embedding],
        "head": modules[head],
        "layers": first.rpartition(".")[0],
    }


def _others(model: PreTrainedModel, paths: dict[str, str]) -> dict[str, Any]:
    """Return a decoder's parts besides layers, embedding and head, as fields of `ModelShape`;
    raises `UserError` for one that is neither a vector, a linear nor a table of tokens."""
    linears = [
        Linear(path, module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and path != paths["head"]
        and not path.startswith(f"{paths['layers']}.")
    ]
    beside = [id(table.weight) for table in other_tables(model)]
    described = {f"{paths['embedding']}.weight", f"{paths['head']}.weight"}
    described |= {f"{linear.path}.weight" for linear in linears}
    others = {
        name: param
        for name, param in model.named_parameters(remove_duplicate=False)
        if name not in described and not name.startswith(f"{paths['layers']}.")
    }
    tables = {name: tuple(param.shape) for name, param in others.items() if id(param) in beside}
    vectors = {name: param for name, param in others.items() if name not in tables}
    wide = [name for name, param in vectors.items() if param.dim() > 1]
    if wide:
        raise UserError(
            f"{wide[0]} is neither a linear nor a table of tokens, and lies beside the decoder "
            "layers: its memory is not known. Choose another model.source."
        )
    return {
        "other_vectors": tuple((name, param.numel()) for name, param in sorted(vectors.items())),
        "other_linears": tuple(linears),
        "other_tables": tuple(sorted(tables.items())),
    }

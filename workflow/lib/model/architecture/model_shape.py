"""What preflight knows of a model without its weights: `config.json` and the safetensors headers,
held against each other.

A decoder layer is a list of linears, whose shapes follow from config.json by the tables of
`families`, and some 1-D tensors (norms, biases), taken from the headers; for a model that is not
there yet, from those tables too. All layers of a supported family are alike.
Nothing here builds a model or knows how many bytes anything takes (`memory` does).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.model.architecture.families import EXPERT_KEYS, FAMILIES, OPTIONAL_BIASES, Family
from workflow.lib.model.architecture.safetensors_headers import TensorInfo, read_headers
from workflow.lib.system.errors import UserError

SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Far above any model, and far below what would take hours or all memory: a config.json may say
# anything.
LARGEST_SIZES = {
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**40,
}
MAX_CONFIG_BYTES = 2**24
SHOWN_DIGITS = 20
NUMBER = re.compile(r"[0-9]{1,9}")

FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # types that can be quantized to NF4


@dataclass(frozen=True)
class Linear:
    """One linear of a decoder layer; `path` is its place in the layer (`self_attn.q_proj`)."""

    path: str
    out_features: int
    in_features: int

    @property
    def name(self) -> str:
        """Last component of its path."""
        return self.path.rpartition(".")[2]

    @property
    def num_weights(self) -> int:
        """Elements of its weight."""
        return self.out_features * self.in_features


@dataclass(frozen=True)
class ModelShape:
    """The shape facts of a decoder-only model."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    logit_softcap: bool
    attention_softcap: bool
    hidden_norms: int
    qk_norm: bool
    source_dtype: str
    """Type of the linears in the checkpoint, as safetensors calls it."""
    linears: tuple[Linear, ...]
    """The linears of one decoder layer."""
    layer_vectors: tuple[int, ...]
    """Lengths of the 1-D tensors (norms, biases) of one decoder layer."""

    def linear_paths(self) -> list[str]:
        """Return the paths of all decoder linears in the model."""
        layers = range(self.num_layers)
        return [f"model.layers.{n}.{linear.path}" for n in layers for linear in self.linears]

    @property
    def quantized_weights(self) -> int:
        """Elements of all decoder linears."""
        return self.num_layers * sum(linear.num_weights for linear in self.linears)

    @property
    def plain_weights(self) -> int:
        """Elements of embedding, head and norms, which stay in the compute type."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self.num_layers * sum(self.layer_vectors) + self.hidden_size

    @property
    def source_bytes(self) -> int:
        """Bytes of one weight in the checkpoint."""
        return FLOAT_BYTES[self.source_dtype]


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of the model in `folder` from its config.json and safetensors headers.

    Raises `UserError` if the family is not supported, the model is quantized already, or the files
    are missing, broken, or disagree with config.json.
    """
    path = folder / "config.json"
    config = read_config(path)
    family = _family(config, path)
    sizes = _sizes(config, family, path)
    linears = _linears(family, sizes)
    tensors = read_headers(folder)
    _check_tables(tensors, sizes, tied=_tied(config, family), folder=folder)
    vectors = _check_layers(tensors, linears, num_layers=sizes["num_hidden_layers"], folder=folder)
    source_dtype = tensors[f"model.layers.0.{next(iter(linears))}.weight"].dtype
    return _shape(config, family, sizes, vectors=vectors, source_dtype=source_dtype)


def shape_of_config(config: dict[str, Any], *, origin: Path) -> ModelShape:
    """Return the shape that a config.json alone promises, without a checkpoint; stored in bf16
    unless it says otherwise.

    `origin` names the document in messages. Raises `UserError` as `read_shape` does.
    """
    _refuse_quantized(config, origin)
    family = _family(config, origin)
    sizes = _sizes(config, family, origin)
    dims = _dims(sizes)
    named = dict(family.vectors)
    for switch, biases in OPTIONAL_BIASES.items():
        if config.get(switch):
            named |= biases
    dtype = str(config.get("dtype", config.get("torch_dtype", "bfloat16")))
    return _shape(
        config,
        family,
        sizes,
        vectors=tuple(dims[named[name]] for name in sorted(named)),
        source_dtype={"float32": "F32", "float16": "F16"}.get(dtype, "BF16"),
    )


def _shape(
    config: dict[str, Any],
    family: Family,
    sizes: dict[str, int],
    *,
    vectors: tuple[int, ...],
    source_dtype: str,
) -> ModelShape:
    linears = _linears(family, sizes)
    return ModelShape(
        family=config["model_type"],
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
        tied_embeddings=_tied(config, family),
        logit_softcap=config.get("final_logit_softcapping") is not None,
        attention_softcap=config.get("attn_logit_softcapping") is not None,
        hidden_norms=family.hidden_norms,
        qk_norm=family.qk_norm,
        source_dtype=source_dtype,
        linears=tuple(Linear(path, *shape) for path, shape in linears.items()),
        layer_vectors=vectors,
    )


def _tied(config: dict[str, Any], family: Family) -> bool:
    return bool(config.get("tie_word_embeddings", family.tied_by_default))


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json; raises `UserError` as `read_bounded` does, and for a model that is
    quantized already.
    """
    config = read_bounded(path)
    _refuse_quantized(config, path)
    return config


def read_bounded(path: Path) -> dict[str, Any]:
    """Read any config.json, before a library builds lists of as many entries as it says.

    Raises `UserError` if it is no JSON object, or a size in it, or in a model within it, is beyond
    `LARGEST_SIZES`.
    """

    def checked(content: dict[str, Any]) -> dict[str, Any]:
        for key in content.keys() & LARGEST_SIZES.keys():
            _check_size(key, content[key], path)
        return content

    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES // 2**20} MiB")
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=checked)
    except UserError:  # a ValueError too
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). Check model.source.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object: it describes no model. Check model.source.")
    return config


def _check_size(key: str, value: Any, path: Path) -> None:
    if isinstance(value, int | float) and value > LARGEST_SIZES[key]:
        shown = str(value)
        shown = shown if len(shown) <= SHOWN_DIGITS else f"{shown[:SHOWN_DIGITS]}..."
        raise UserError(
            f"{path}: {key} = {shown}: must be at most {LARGEST_SIZES[key]:,}. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )


def _refuse_quantized(config: dict[str, Any], path: Path) -> None:
    if "quantization_config" in config:
        raise UserError(
            f"{path} describes a model that is quantized already. "
            "Set model.source to the original bf16, fp16 or fp32 checkpoint."
        )


def _family(config: dict[str, Any], path: Path) -> Family:
    name = config.get("model_type")
    supported = f"Supported: {', '.join(FAMILIES)}"
    experts = [key for key in EXPERT_KEYS if config.get(key)]
    if experts:
        raise UserError(
            f"{path}: model_type {name!r} is a mixture of experts ({experts[0]} = "
            f"{config[experts[0]]}), "
            f"which this workflow cannot train. {supported}."
        )
    if "auto_map" in config and name not in FAMILIES:
        raise UserError(
            f"{path}: model_type = {name!r} is code of the model's own repository (auto_map), "
            "which is never run. "
            f"Choose another model.source. {supported}."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{path}: model_type = {name!r} is not supported. {supported}.")
    return FAMILIES[name]


def _sizes(config: dict[str, Any], family: Family, path: Path) -> dict[str, int]:
    """Return the sizes by their config.json name, with the two that may be left out filled in."""
    needed = (*SIZE_KEYS, "head_dim") if family.needs_head_dim else SIZE_KEYS
    heads = config.get("num_attention_heads")
    sizes = {key: config.get(key) for key in needed}
    sizes["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    if config.get("head_dim") is not None:
        sizes["head_dim"] = config["head_dim"]
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{path}: {key} = {value!r}: must be a whole number above 0. "
                "Give the config.json that belongs to the checkpoint (model.source)."
            )
        _check_size(key, value, path)
    checked = {key: int(value) for key, value in sizes.items() if value is not None}
    checked.setdefault("head_dim", checked["hidden_size"] // checked["num_attention_heads"])
    if checked["head_dim"] < 1:
        raise UserError(
            f"{path}: num_attention_heads = {checked['num_attention_heads']}: must be at most "
            f"hidden_size = {checked['hidden_size']}. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )
    return checked


def _linears(family: Family, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return shape (out_features, in_features) of each linear of a layer, by its path in the
    layer.
    """
    dims = _dims(sizes)
    return {path: (dims[out], dims[into]) for path, (out, into) in family.linears.items()}


def _dims(sizes: dict[str, int]) -> dict[str, int]:
    """Return the dimensions by the letters of the tables above."""
    head_dim = sizes["head_dim"]
    q, k = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    h, f = sizes["hidden_size"], sizes["intermediate_size"]
    return {"h": h, "f": f, "d": head_dim, "q": q, "k": k, "q+2k": q + 2 * k, "2f": 2 * f}


def _check_tables(
    tensors: Mapping[str, TensorInfo], sizes: dict[str, int], *, tied: bool, folder: Path
) -> None:
    """Check embedding, final norm and output head."""
    h, vocab = sizes["hidden_size"], sizes["vocab_size"]
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, h),
        "model.norm.weight": (h,),
    }
    if not tied:
        expected["lm_head.weight"] = (vocab, h)
    for name, shape in expected.items():
        _check_tensor(tensors, name, shape, folder=folder)


def _check_tensor(
    tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], *, folder: Path
) -> None:
    if name not in tensors:
        raise UserError(
            f"{folder}: the checkpoint has no tensor {name}, which its config.json asks for. "
            "The files do not belong together, or the download is not complete: check model.source."
        )
    tensor = tensors[name]
    if tensor.dtype not in FLOAT_BYTES:
        raise UserError(
            f"{folder}: {name} is stored as {tensor.dtype}: the model is quantized already. "
            "Set model.source to the original bf16, fp16 or fp32 checkpoint."
        )
    if tensor.shape != shape:
        raise UserError(
            f"{folder}: {name} has shape {list(tensor.shape)}, but config.json says {list(shape)}. "
            "The files do not belong together: check model.source."
        )


def _check_layers(
    tensors: Mapping[str, TensorInfo],
    linears: Mapping[str, tuple[int, int]],
    *,
    num_layers: int,
    folder: Path,
) -> tuple[int, ...]:
    """Check every decoder layer's linears; return the lengths of the 1-D tensors, equal in all
    layers.
    """
    layers = _by_layer(tensors)
    if set(layers) - set(range(num_layers)):
        raise UserError(
            f"{folder}: the checkpoint has decoder layer {max(layers)}, but config.json says "
            f"num_hidden_layers = {num_layers}. The files do not belong together: check "
            "model.source."
        )
    weights = {f"{path}.weight" for path in linears}
    vectors = [
        tuple(math.prod(layers[i][n].shape) for n in sorted(layers[i].keys() - weights))
        for i in sorted(layers)
    ]
    for layer in range(num_layers):
        for path, shape in linears.items():
            _check_tensor(tensors, f"model.layers.{layer}.{path}.weight", shape, folder=folder)
    different = [i for i, vector in enumerate(vectors) if vector != vectors[0]]
    if different:
        raise UserError(
            f"{folder}: norms and biases of decoder layer {different[0]} differ from layer 0. "
            "The checkpoint is not complete, or its family is not what config.json says: check "
            "model.source."
        )
    return vectors[0]


def _by_layer(tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Return the tensors of each decoder layer by their name in it, without stored rotary
    tables.
    """
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".", 3)
        inside = parts[:2] == ["model", "layers"] and len(parts) == 4 and NUMBER.fullmatch(parts[2])
        if inside and not name.endswith("rotary_emb.inv_freq"):
            layers.setdefault(int(parts[2]), {})[parts[3]] = tensor
    return layers

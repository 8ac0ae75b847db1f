"""The shape of a model for planning: decoder layers by kind, tables and limits, as JSON.

`model.describe_model` builds the model's own class for it; reading it needs no torch. Layers of a
kind have the same tensors and operations. It knows no bytes (`planning.memory` does)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from workflow.lib.checkpoints.files.safetensors_headers import FLOAT_BYTES
from workflow.lib.model.architecture.routers import router_paths
from workflow.lib.system.checksums import read_artifact
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json

CONFIG = "config"
"""Key of a description's config.json, which recordings read."""


@dataclass(frozen=True)
class Linear:
    """A linear of a decoder layer, or a stack of experts; `path`: in the layer."""

    path: str
    out_features: int  # of a stack: of all its experts together
    in_features: int
    experts: int = 1

    @property
    def name(self) -> str:
        """Last component of its path."""
        return self.path.rpartition(".")[2]

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def adapter_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B at rank 1; dims that count experts are multiplied by the rank."""
        return (self.experts, self.in_features), (self.out_features // self.experts, self.experts)


@dataclass(frozen=True)
class DecoderLayer:
    """A kind of decoder layer."""

    attention: str  # `full`, `sliding` (a window), `chunked` or `none`
    attention_softcap: bool
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linears: tuple[Linear, ...]  # in the order in which forward calls them
    vectors: tuple[tuple[str, int], ...]
    """Name and elements of all other 1-D tensors (norms, biases), sorted by name."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of other tensors that stay in 16 bits (routers, convolutions), sorted."""
    value_dim: int | None = None  # width of a head's values; None: as wide as its keys
    sinks: bool = False  # a learned score per head takes its share of attention (gpt-oss)
    recurrent: bool = False
    """It keeps a state along the tokens (a convolution, Mamba, linear attention)."""
    top_k: int = 0  # experts that a token takes; 0 without experts

    @property
    def num_weights(self) -> int:
        return sum(linear.num_weights for linear in self.linears)

    @property
    def value_head(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def value_width(self) -> int:
        """Elements of a token's output of attention."""
        return self.num_heads * self.value_head

    def rows(self, linear: Linear) -> int:
        """Rows that a linear of the layer multiplies for each token."""
        return self.top_k if linear.experts > 1 else 1

    @property
    def has_gated_feed_forward(self) -> bool:
        """Whether a module has linears of the sizes of gate, up (or one for both) and down."""
        modules: dict[str, list[Linear]] = {}
        for linear in self.linears:
            modules.setdefault(linear.path.rpartition(".")[0], []).append(linear)
        return any(map(_is_gated, modules.values()))

    @property
    def routers(self) -> tuple[str, ...]:
        """Paths of the routers of its experts."""
        stacks = {x.path.rpartition(".")[0]: x.experts for x in self.linears if x.experts > 1}
        return tuple(router_paths(stacks, dict(self.tensors)).values())

    @property
    def used_weights(self) -> int:
        """Elements of its linears that multiply one token."""
        return sum(x.num_weights // x.experts * self.rows(x) for x in self.linears)


def _is_gated(linears: Sequence[Linear]) -> bool:
    """Whether linears of a module could be of a gated feed-forward, the last one of its output."""
    *into, down = linears
    wide = down.in_features * (3 - len(into))
    sizes = {(x.in_features, x.out_features) for x in into}
    return len(into) in (1, 2) and sizes == {(down.out_features, wide)}


@dataclass(frozen=True)
class ModelShape:
    """The shapes of a decoder-only model."""

    family: str  # `model_type` of its config.json (of the text part)
    kinds: tuple[DecoderLayer, ...]
    order: tuple[int, ...]  # the kind of every decoder layer: its place in `kinds`
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    embedding: str  # paths of the embedding, of the output head and of the list of decoder layers
    head: str
    layers: str
    tied_embeddings: bool
    logit_softcap: bool
    attention_masks: int
    """Masks of a forward of packed rows: one, or one for each kind of attention."""
    other_vectors: tuple[tuple[str, int], ...]
    """Name and elements of vectors outside of decoder layers and tables: the final norm."""
    source_dtype: str  # type of the linears in the checkpoint, as safetensors calls it
    attention_dropout: float = 0.0  # share of attention weights that training drops
    masked: bool = False  # its attention separates documents by the mask alone
    rotates_by_length: bool = False
    """Rotary frequencies depend on the lengths of documents (LongRoPE, dynamic NTK)."""
    other_linears: tuple[Linear, ...] = ()
    """Linears of the decoder outside of its layers, with their paths in the model."""
    other_tables: tuple[tuple[str, tuple[int, int]], ...] = ()
    """Name and shape of tables of tokens beside the embedding (per-layer embeddings of Gemma)."""
    router_aux_loss_coef: float | None = None
    """Coefficient of the family's load-balancing loss, by config.json; None: it has none."""
    left_tensors: int = 0
    """Tensors that no part loads (multi-token prediction): only copied into a merged model."""
    config_sha256: str = field(default="", compare=False)  # of the described config.json

    @property
    def num_layers(self) -> int:
        return len(self.order)

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of layers of each kind."""
        return dict(Counter(self.order))

    def layer(self, number: int) -> DecoderLayer:
        return self.kinds[self.order[number]]

    def total(
        self, size: Callable[[DecoderLayer], int], layers: Iterable[int] | None = None
    ) -> int:
        """Return the sum of a size over all decoder layers, or over these numbers."""
        counts = self.counts
        if layers is not None:
            counts = dict(Counter(self.order[number] for number in layers))
        return sum(count * size(self.kinds[kind]) for kind, count in counts.items())

    def largest(self, size: Callable[[DecoderLayer], int]) -> int:
        """Return the largest size of any decoder layer."""
        return max(map(size, self.kinds))

    @cached_property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the linears of all kinds, each once."""
        linears = [*(x for kind in self.kinds for x in kind.linears), *self.other_linears]
        return tuple(dict.fromkeys(linear.name for linear in linears))

    def linears_by_path(self) -> dict[str, Linear]:
        """Return all decoder linears and stacks of experts by their paths in the model."""
        in_layers = {
            f"{self.layers}.{number}.{linear.path}": linear
            for number in range(self.num_layers)
            for linear in self.layer(number).linears
        }
        return in_layers | {linear.path: linear for linear in self.other_linears}

    def linear_paths(self) -> list[str]:
        """Return the paths of `linears_by_path`."""
        return list(self.linears_by_path())

    def router_paths(self) -> list[str]:
        """Return the paths of the routers of all layers in the model."""
        return [
            f"{self.layers}.{number}.{path}"
            for number in range(self.num_layers)
            for path in self.layer(number).routers
        ]

    @cached_property
    def quantized_weights(self) -> int:
        """Elements of all decoder linears."""
        others = sum(linear.num_weights for linear in self.other_linears)
        return self.total(lambda layer: layer.num_weights) + others

    @cached_property
    def plain_weights(self) -> int:
        """Elements of embedding, head, norms and all other tensors in the compute dtype."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        tables += sum(prod(table) for _, table in self.other_tables)
        vectors = self.total(lambda layer: sum(length for _, length in layer.vectors))
        wide = self.total(lambda layer: sum(prod(shape) for _, shape in layer.tensors))
        return tables + vectors + wide + sum(length for _, length in self.other_vectors)

    @property
    def source_bytes(self) -> int:
        """Bytes of one weight in the checkpoint."""
        return FLOAT_BYTES[self.source_dtype]

    def document(self) -> dict[str, Any]:
        """Return it as JSON for `shape_of_document`."""
        kinds = [
            asdict(kind)
            | {
                "linears": {x.path: _sizes(x) for x in kind.linears},
                "vectors": dict(kind.vectors),
                "tensors": dict(kind.tensors),
            }
            for kind in self.kinds
        ]
        return asdict(self) | {
            "kinds": kinds,
            "other_vectors": dict(self.other_vectors),
            "other_linears": {x.path: _sizes(x) for x in self.other_linears},
            "other_tables": dict(self.other_tables),
        }


def _sizes(linear: Linear) -> list[int]:
    stacked = [linear.experts] if linear.experts > 1 else []
    return [linear.out_features, linear.in_features, *stacked]


def shape_of_document(document: Mapping[str, Any]) -> ModelShape:
    """Read the result of `ModelShape.document`; raises `KeyError` or its like."""
    kinds = tuple(
        DecoderLayer(
            **kind
            | {
                "linears": tuple(Linear(path, *sizes) for path, sizes in kind["linears"].items()),
                "vectors": tuple(kind["vectors"].items()),
                "tensors": tuple((n, tuple(x)) for n, x in kind.get("tensors", {}).items()),
            }
        )
        for kind in document["kinds"]
    )
    others = {
        "other_vectors": tuple(document["other_vectors"].items()),
        "other_linears": tuple(Linear(x, *size) for x, size in document["other_linears"].items()),
        "other_tables": tuple((name, tuple(x)) for name, x in document["other_tables"].items()),
    }
    order = {"kinds": kinds, "order": tuple(document["order"])}
    return ModelShape(**dict(document) | order | others)


def described_config(model: Path) -> dict[str, Any]:
    """Return the config.json of a model's folder, or that within a description."""
    if model.is_dir():
        config: dict[str, Any] = read_json(model / "config.json")
        return config
    return dict(read_artifact(model)[CONFIG])


def read_shape(path: Path) -> ModelShape:
    """Read a description that `describe_model` has written; raises `UserError` for another file."""
    if not path.exists():
        raise UserError(
            f"{path} does not exist yet: describe_model writes it. Run the target tokenize first."
        )
    document = read_artifact(path)
    try:
        return shape_of_document({x: document[x] for x in document if x != CONFIG})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no description of a model, or of another version ({error!r}). "
            "Delete it and run again."
        ) from None

"""The options that trade memory for time: a plan's fields for them, and the table of them.

All code on options in general reads the table: settings to a plan, the search, remedies, a plan's
words. A new option is a setting, a field and a row here, and its code in the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from workflow.lib.kernels.attention.attention_choice import VARLEN
from workflow.lib.model.architecture.layer_choice import (
    LayerChoice,
    Recomputation,
    activation_offload_layers,
    is_recomputed,
    recomputed_layers,
    spread,
)
from workflow.lib.step_plan.base_plan import BasePlan
from workflow.lib.system.errors import setting_error

Value = bool | int | float | str


class Circumstances(NamedTuple):
    """A machine's and a model's facts for options."""

    cuda: bool
    processes: int
    num_layers: int
    tied_embeddings: bool
    embedding: str  # path of the embedding
    seq_len: int = 0  # tokens of a row on a process
    tileable: bool = False
    """Whether the engine has feed-forwards or experts in one node."""


class Obstacle(NamedTuple):
    """Why an option is impossible, naming the obstacle, and what to change."""

    reason: str
    change: str


def _nothing(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    return None


@dataclass(frozen=True)
class MemoryOption:
    """A row: an option's facts outside of the engine's code."""

    field: str  # of `MemoryOptions`
    setting: str
    off: Value  # without the option
    most: Value | None = None  # saves most memory, named by a remedy; None: it is no remedy
    first: Value | None = None  # start of the search; None: `off`
    automatic: Callable[[BasePlan, Circumstances], Value] | None = None
    """The value of `auto`; None: the search decides."""
    tried: Callable[[Circumstances], Sequence[Value]] | None = None
    """The values that the search tries for `auto`; None: no others."""
    fewest: bool = False  # counts layers; the search takes the fewest with which a plan fits
    spends: bool = False  # counts layers; the search takes the most with which a plan fits
    obstacle: Callable[[BasePlan, Value, Circumstances], Obstacle | None] = _nothing
    left_out: bool = False
    """On by default: an obstacle turns it off; other options are refused."""
    rounds: bool = False  # the result differs by rounding
    on_host: bool = False  # takes page-locked host memory
    frees_gathered: bool = False  # without it, gathered weights stay on the GPUs
    needless: Callable[[Any], bool] = lambda plan: False
    """Whether a plan is equal to another one of the search."""
    title: str = ""
    """Title of `words`; rows with one title are joined. Empty: not among a plan's words."""
    words: Callable[[Any, int], str] = lambda value, num_layers: str(value)
    """Name of a value, of a model with so many decoder layers; empty: not named."""

    @property
    def begins(self) -> Value:
        return self.off if self.first is None else self.first

    @property
    def searched(self) -> bool:
        """Whether preflight may decide it."""
        return self.tried is not None or self.fewest or self.spends

    def of(self, plan: BasePlan) -> Any:
        """Return a plan's value."""
        return getattr(plan, self.field)

    def settled(self, wanted: Value, plan: BasePlan, where: Circumstances) -> Value:
        """Return the value of a setting in a plan before the search, or raise `UserError`."""
        if wanted == "auto":
            return self.begins if self.automatic is None else self.automatic(plan, where)
        obstacle = None if wanted == self.off else self.obstacle(plan, wanted, where)
        if obstacle is None:
            return wanted
        if self.left_out:
            return self.off
        raise setting_error(self.setting, wanted, *obstacle)

    def open_values(self, wanted: Value, where: Circumstances) -> Sequence[Value]:
        """Return the values that the search tries; empty if it has no choice."""
        return self.tried(where) if wanted == "auto" and self.tried is not None else ()


# `auto`: none, every 8th to every 2nd layer, more than half, all. Finer steps differ by less than
# the error of the prediction.
LEVELS: tuple[Recomputation, ...] = (False, 8, 4, 3, 2, 0.625, 0.75, True)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(BasePlan):
    """The options of a plan."""

    activation_checkpointing: Recomputation = True
    """Recomputation in backward: of all layers, of none, of every k-th, or of a share of them."""
    keep_attention: bool = False
    """Recomputed layers keep attention's results, in host memory where activations are there."""
    reshard_after_forward: bool = True
    """Gathered weights are freed after forward, and gathered again for backward."""
    offload_embedding: bool = False
    """Embedding rows are looked up on the host; a table that is the head's too stays here."""
    offload_activations: bool | int = False
    """Activations are offloaded to host memory until backward: all, or those of so many layers."""
    offload_window_bytes: int | None = None
    """Offloaded activations on the device at a time; null without offloaded ones."""
    offload_layers: int = 0  # decoder layers whose packed weights are offloaded to host memory
    keep_decoded: int = 0  # decoder layers whose frozen weights stay decoded, all if too many
    cuda_graphs: bool = False
    """Forward and backward of a micro-batch are a CUDA graph, unless an obstacle forbids it."""
    fused_layers: bool = False  # fused norms and feed-forwards, where the family has such
    fused_loss: bool = False
    """Kernels compute the loss from 16-bit logits, and put the gradient in their place."""
    tile_tokens: int = 0
    """Tokens of feed-forwards and experts at a time; 0: all. Else attention's backward takes some
    heads at a time, too."""

    def layers(self, num_layers: int) -> LayerChoice:
        """Return the decoder layers that the options take, of so many."""
        level = self.activation_checkpointing
        return LayerChoice(
            recomputed_layers(level, num_layers),
            activation_offload_layers(
                self.offload_activations, recomputation=level, num_layers=num_layers
            ),
            spread(self.offload_layers, num_layers),
            spread(min(self.keep_decoded, num_layers), num_layers),
        )

    @property
    def rows_from_host(self) -> int:
        """Embedding rows of a micro-batch that are looked up in host memory."""
        return self.tokens if self.offload_embedding else 0

    def recomputes(self, layer: int) -> bool:
        """Whether backward recomputes a decoder layer."""
        return is_recomputed(self.activation_checkpointing, layer)

    @property
    def graph_obstacle(self) -> str | None:
        """What prevents CUDA graphs of micro-batches, in words; None: nothing known."""
        obstacles = {
            f"hardware.context_parallel = {self.context_parallel}: processes exchange heads within "
            "a micro-batch": self.context_parallel > 1,
            f"hardware.nodes = {self.nodes}: machines exchange data within a micro-batch": (
                self.nodes > 1
            ),
            f"model.attention = {self.attention}: its kernels are not of a fixed layout": (
                self.attention_kind not in ("flash", "flex")
            ),
        }
        return next((words for words, applies in obstacles.items() if applies), None)

    @property
    def graphed(self) -> bool:
        """Whether micro-batches are CUDA graphs."""
        return self.cuda_graphs and self.graph_obstacle is None

    def without_forbidden(self) -> Self:
        """Return the plan without values that its other options forbid."""
        return replace(self, cuda_graphs=self.graphed)


def _levels(where: Circumstances) -> Sequence[Recomputation]:
    """All levels without shares of the same layers as a simpler level."""
    layers = {level: recomputed_layers(level, where.num_layers) for level in LEVELS}
    simple = [taken for level, taken in layers.items() if not isinstance(level, float)]
    return [x for x, taken in layers.items() if not isinstance(x, float) or taken not in simple]


def _layers_in_words(count: int, num_layers: int) -> str:
    if count in (0, num_layers):
        return f"all {num_layers} layers" if count else "no layers"
    return f"{count} of {num_layers} layers"


def _activations_in_words(value: bool | int, num_layers: int) -> str:
    count = num_layers if value is True else int(value)
    return f"activations of {_layers_in_words(count, num_layers)}" if count else ""


def _layers_obstacle(what: str, *, off: str, whole: str = "") -> Callable[..., Obstacle | None]:
    """The obstacles of an option that offloads `what` of some layers; whole: also to be set."""

    def obstacle(plan: BasePlan, value: int, where: Circumstances) -> Obstacle | None:
        if not where.cuda:
            return Obstacle(
                f"this run is on CPUs, whose {what} are in host memory anyway",
                f"Set it to auto or {off}, or use GPUs (hardware.gpus)",
            )
        if value > where.num_layers:
            return Obstacle(
                f"the model has {where.num_layers} decoder layers",
                f"Set it to that number or below,{whole} or to auto",
            )
        return None

    return obstacle


def _embedding_obstacle(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    if plan.trains_embedding:
        return Obstacle(
            "lora.modules_to_save trains the embedding, whose table is then on the devices",
            f"Set it to auto or false, or take {where.embedding.rpartition('.')[2]} out of "
            "lora.modules_to_save",
        )
    if not where.cuda:
        return Obstacle(
            "without a GPU there is no other memory than the host's", "Set it to auto or false"
        )
    if where.processes == 1 and where.tied_embeddings:
        return Obstacle(
            "this model's embedding is its output head too, which one GPU needs whole",
            "Set it to auto or false, or use more GPUs",
        )
    return None


def _needs_gpu(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    return None if where.cuda else Obstacle("this run is on CPUs", "Set it to false")


def _needs_16_bits(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    if plan.compute_dtype == "float32":
        return Obstacle("model.compute_dtype is float32", "Set it to false")
    return _needs_gpu(plan, value, where)


def _kept_obstacle(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    if plan.attention == VARLEN:
        return None
    return Obstacle(
        f"model.attention is {plan.attention}, and only results of {VARLEN} can be kept",
        f"Set it to auto or false, or model.attention to {VARLEN}",
    )


def _tiles_obstacle(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    if where.tileable:
        return None
    return Obstacle(
        "tiles are of experts, and of gated feed-forwards with train.fused_layers = true, which "
        "this model does not have",
        "Set it to auto or 0",
    )


OFFLOADED = "offloaded to host memory"  # title
# Of `auto`: the wide tensors of a tile of Llama 3.1 8B take 0.66 GiB, and decoding weights for each
# tile reads and writes 1/55 of the bytes that its matmuls' work could (H200).
TILE_TOKENS = 8192

# The order of remedies: first those without effect on the result, the nearest first, then those
# that round.
TABLE = (
    MemoryOption(
        "activation_checkpointing",
        "train.activation_checkpointing",
        off=False,
        most=True,
        first=True,
        tried=_levels,
        title="recomputation",
        words=lambda level, num_layers: _layers_in_words(
            len(recomputed_layers(level, num_layers)), num_layers
        ),
    ),
    MemoryOption(
        "keep_attention",
        "train.keep_attention",
        off=False,
        most=False,
        # of shorter rows attention takes too little time
        tried=lambda where: (
            (False, True) if where.cuda and where.seq_len >= 2 * TILE_TOKENS else ()
        ),
        obstacle=_kept_obstacle,
        needless=lambda plan: (
            plan.keep_attention and not (plan.activation_checkpointing and plan.attention == VARLEN)
        ),
        title="recomputation",
        words=lambda kept, _: "without attention" if kept else "",
    ),
    MemoryOption(
        "reshard_after_forward",
        "hardware.reshard_after_forward",
        off=False,
        most=True,
        first=True,
        tried=lambda where: (True, False) if where.cuda and where.processes > 1 else (),
        frees_gathered=True,
        title="gathered weights",
        words=lambda freed, _: "freed after forward" if freed else "kept for backward",
    ),
    MemoryOption(
        "keep_decoded",
        "hardware.keep_decoded",
        off=0,
        most=0,
        spends=True,
        # kept activations save more time by byte
        needless=lambda plan: (
            bool(plan.activation_checkpointing or plan.offload_activations or plan.offload_layers)
            or not plan.decodes
        ),
        title="recomputation",
        words=lambda count, num_layers: (
            f"weights of {_layers_in_words(min(count, num_layers), num_layers)} kept decoded"
            if count
            else ""
        ),
    ),
    MemoryOption(
        "tile_tokens",
        "hardware.tile_tokens",
        off=0,
        most=TILE_TOKENS,
        # a shorter row has no tensors that matter
        tried=lambda where: (
            (0, TILE_TOKENS) if where.tileable and where.seq_len >= 2 * TILE_TOKENS else ()
        ),
        obstacle=_tiles_obstacle,
        rounds=True,
        title="recomputation",
        words=lambda tokens, _: f"feed-forwards in tiles of {tokens:,} tokens" if tokens else "",
    ),
    MemoryOption(
        "offload_embedding",
        "hardware.offload_embedding",
        off=False,
        most=True,
        automatic=lambda plan, where: (
            where.cuda and where.processes > 1 and not plan.trains_embedding
        ),
        obstacle=_embedding_obstacle,
    ),
    MemoryOption(
        "offload_activations",
        "hardware.offload_activations",
        off=False,
        most=True,
        tried=lambda where: (False, max(1, where.num_layers // 2), True) if where.cuda else (),
        obstacle=_layers_obstacle("activations", off="false", whole=" to true,"),
        on_host=True,
        title=OFFLOADED,
        # of recomputed layers the inputs are offloaded, all or none
        needless=lambda plan: (
            type(plan.offload_activations) is int and plan.activation_checkpointing == 1
        ),
        words=_activations_in_words,
    ),
    MemoryOption(
        "offload_layers",
        "hardware.offload_layers",
        off=0,
        fewest=True,
        obstacle=_layers_obstacle("weights", off="0"),
        on_host=True,
        title=OFFLOADED,
        words=lambda count, num_layers: (
            f"weights of {_layers_in_words(count, num_layers)}" if count else ""
        ),
    ),
    MemoryOption(
        "cuda_graphs",
        "hardware.cuda_graphs",
        off=False,
        obstacle=_needs_gpu,
        left_out=True,
        rounds=True,
    ),
    MemoryOption("fused_layers", "train.fused_layers", off=False, most=True, rounds=True),
    MemoryOption(
        "fused_loss",
        "train.fused_loss",
        off=False,
        most=True,
        obstacle=_needs_16_bits,
        left_out=True,
        rounds=True,
    ),
)


def unsearched_settings() -> dict[str, dict[str, Value]]:
    """Return settings, by section, by which the search decides on no option."""
    document: dict[str, dict[str, Value]] = {}
    for option in TABLE:
        if option.searched:
            section, _, name = option.setting.partition(".")
            document.setdefault(section, {})[name] = option.begins
    return document


def takes_host_memory(plan: BasePlan) -> bool:
    """Whether a plan uses page-locked host memory."""
    return any(option.on_host and option.of(plan) for option in TABLE)


def demands(plan: BasePlan) -> tuple[bool, bool]:
    """Return a plan's demands besides GPU memory: page-locked memory, room for gathered weights."""
    keeps = any(option.frees_gathered and not option.of(plan) for option in TABLE)
    return takes_host_memory(plan), keeps


def in_words(plan: BasePlan, num_layers: int) -> Mapping[str, str]:
    """Return a plan's choices besides the micro-batch in words, by title. One process gathers
    no weights."""
    choices: dict[str, list[str]] = {}
    for option in TABLE:
        if option.title and (plan.processes > 1 or not option.frees_gathered):
            words = option.words(option.of(plan), num_layers)
            choices.setdefault(option.title, []).append(words)
    return {title: ", ".join(filter(None, words)) or "nothing" for title, words in choices.items()}

"""`StepPlan`: the one description of how a step of training runs."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Strict, TypeAdapter

from workflow.lib.model.architecture.layer_choice import (
    Recomputation,
    is_recomputed,
    recomputed_share,
)
from workflow.lib.model.architecture.vocabulary_slices import vocabulary_slices
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, FLEX, VARLEN

AttentionKind = Literal["flash", "flex", "sdpa", "eager"]
Names = Annotated[tuple[str, ...], Strict(False)]  # JSON has lists
NEXT_TOKEN = "next_token"


@dataclass(frozen=True)
class StepPlan:
    """How a step runs: all that the engine, its memory and its time depend on besides the model."""

    __pydantic_config__ = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    processes: int
    """Of all nodes together, one for each GPU."""
    micro_batch_size: int
    """Rows of a process and forward pass."""
    seq_len: int
    """Tokens of a row."""
    rank: int
    """Of the adapters, where `ranks` says nothing else."""
    targets: Names
    """Names of the linears that have an adapter."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    nodes: int = 1
    """Machines that share the processes equally."""
    replicas: int = 1
    """Copies of the model, each sharded over its own part of the processes."""
    accumulation_steps: int = 1
    """Micro-batches of a process and optimizer step."""
    compute_dtype: str = "bfloat16"
    """Of activations: `bfloat16`, `float16` or `float32`."""
    attention: str = VARLEN
    """Implementation of attention, by the name that Transformers knows it by."""
    attention_dropout: bool = False
    """Attention weights are dropped, by the share of the model's family."""
    products: str = COMPUTE_DTYPE
    """What training steps multiply frozen weights in: `compute_dtype`, `float8` or `int8`."""
    products_in: str = "both"
    """The passes that do so: `forward`, `backward` or `both`."""
    objective: str = NEXT_TOKEN
    """What the loss is made of."""
    optimizer: str = "adamw"
    """`train.optimizer`."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of targets that differ from `rank`, by name; the largest of all layers."""
    dora: bool = False
    """Adapters are DoRA's."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is dropped."""
    trains_head: bool = False
    """The output head is trained whole, in fp32; the model does not tie it to the embedding."""
    trains_embedding: bool = False
    """The same of the embedding, which is then on the device."""
    routers: Names = ()
    """Paths within a layer of the routers that are trained whole, in fp32."""
    balances_routers: bool = False
    """The routers' load-balancing loss is part of the loss."""
    block_size: int = 64
    """Weights of an NF4 block."""
    double_quant: bool = True
    """Scales of NF4 blocks are quantized too."""
    activation_checkpointing: Recomputation = True
    """Recomputation in backward: of all layers, of none, of every k-th, or of a share of them."""
    offload_activations: bool | int = False
    """Activations wait in host memory for backward: all of them, or those of so many layers."""
    offload_window_bytes: int | None = None
    """Offloaded activations that are on the device at a time; null where none are offloaded."""
    saved_activations: str = COMPUTE_DTYPE
    """Type of activations until backward: `compute_dtype` or `float8`."""
    reshard_after_forward: bool = True
    """Gathered weights are freed after forward, and gathered again for backward."""
    offload_embedding: bool = False
    """Embedding rows are looked up in host memory; a table that is the head's too is on the device
    nevertheless."""
    offload_layers: int = 0
    """Decoder layers whose packed weights are offloaded to host memory."""
    cuda_graphs: bool = False
    """Forward and backward of a micro-batch are a CUDA graph, where nothing forbids it."""
    fused_layers: bool = False
    """Fused norms and feed-forwards, where the family has such."""
    fused_loss: bool = False
    """Kernels compute the loss from 16-bit logits, and put the gradient in their place."""
    gpu_memory_bytes: int | None = None
    """Bound on what PyTorch reserves on each GPU; null: no bound."""
    num_steps: int = 0
    """Optimizer steps of the run; 0 while plans are compared."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan of a JSON document, which may lack what has a default."""
        return TypeAdapter(cls).validate_python(dict(document), strict=False)

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def compute_bytes(self) -> int:
        """c: bytes of the compute dtype."""
        return 4 if self.compute_dtype == "float32" else 2

    @property
    def attention_kind(self) -> AttentionKind:
        """How the attention uses memory."""
        if self.attention == VARLEN or self.attention.startswith("flash"):
            return "flash"
        if self.attention == FLEX:
            return "flex"
        return "eager" if self.attention == "eager" else "sdpa"

    def rank_of(self, target: str) -> int:
        """Rank of the adapters of the linears of this name."""
        return self.ranks.get(target, self.rank)

    @functools.cached_property
    def adapters(self) -> tuple[tuple[str, int], ...]:
        """Targets with their ranks."""
        return tuple((target, self.rank_of(target)) for target in self.targets)

    @property
    def trained_tables(self) -> int:
        """How many of embedding and head are trained whole."""
        return self.trains_head + self.trains_embedding

    @property
    def graph_obstacle(self) -> str | None:
        """What keeps micro-batches from being CUDA graphs, in words; None: nothing is known."""
        obstacles = {
            "machines exchange data within a micro-batch": self.nodes > 1,
            "weights of layers wait in host memory": self.offload_layers > 0,
            "modules are trained whole": self.trained_tables > 0,
            "DoRA's row norms are made once a step": self.dora,
            f"attention by {self.attention_kind}": self.attention_kind not in ("flash", "flex"),
        }
        return next((words for words, there in obstacles.items() if there), None)

    @property
    def graphed(self) -> bool:
        """Whether micro-batches are CUDA graphs."""
        return self.cuda_graphs and self.graph_obstacle is None

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.accumulation_steps > 1

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients lie there throughout: those of earlier micro-batches, or those that a
        graph adds to.
        """
        return self.accumulates or self.graphed

    @property
    def shards(self) -> int:
        """P: processes that share one copy of the model."""
        return self.processes // self.replicas

    @property
    def slices(self) -> int:
        """G: neighbouring processes that share embedding and head."""
        return vocabulary_slices(self.shards)

    def recomputes(self, layer: int) -> bool:
        """Whether backward recomputes decoder layer `layer`
        (`recomputation.checkpoint_activations_`).
        """
        return is_recomputed(self.activation_checkpointing, layer)

    def recomputed_among(self, layers: Sequence[int]) -> int:
        """How many of these layers backward recomputes."""
        return sum(map(self.recomputes, layers))

    def recomputed_layers(self, num_layers: int) -> int:
        """How many of the first `num_layers` layers backward recomputes."""
        return math.ceil(num_layers * recomputed_share(self.activation_checkpointing))

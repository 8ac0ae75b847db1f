"""What a prediction of memory is asked about: batch, sharding, offloading, adapters, attention."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workflow.lib.model.architecture.layer_choice import (
    Recomputation,
    is_recomputed,
    recomputed_share,
)
from workflow.lib.model.architecture.vocabulary_slices import (
    vocabulary_slices,
)
from workflow.lib.system.compute_choice import COMPUTE_DTYPE

Attention = Literal["flash", "flex", "sdpa", "eager"]


@dataclass(frozen=True)
class Setup:
    """All that the bytes depend on besides the model's shape."""

    processes: int
    micro_batch_size: int
    seq_len: int
    rank: int
    targets: tuple[str, ...]
    """Names of the linears that have an adapter."""
    dropout: bool
    block_size: int
    double_quant: bool
    activation_checkpointing: Recomputation
    """Recomputation in backward: of all layers, of none, or of every k-th."""
    reshard_after_forward: bool
    accumulates: bool
    """Several micro-batches a step: gradients of earlier ones lie there throughout."""
    compute_bytes: int
    attention: Attention
    fixed: Mapping[str, int]
    """What the device adds to every phase: `cublas_workspace` (GPU) or `process` (CPU), bytes."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of targets that differ from `rank`, by name; the largest of all layers."""
    dora: bool = False
    attention_dropout: bool = False
    """Attention weights are dropped; where all are made, what says which takes memory."""
    products: str = COMPUTE_DTYPE
    """What training steps multiply frozen weights in: `compute_dtype`, `float8` or `int8`."""
    products_in: str = "both"
    """`train.products_in`."""
    saved_activations: str = COMPUTE_DTYPE
    """In what they wait for backward: `compute_dtype` or `float8`."""
    fused_layers: bool = False
    """Fused norms and feed-forwards, where the family has such."""
    fused_loss: bool = False
    """Kernels compute the loss from 16-bit logits, and put the gradient in their place."""
    offload_activations: bool | int = False
    """What backward needs waits in host memory: all of it, or that of so many layers."""
    nodes: int = 1
    """Machines that share the processes equally."""
    replicas: int = 1
    """Copies of the model, each sharded over its own part of the processes."""
    offload_embedding: bool = False
    """Embedding rows are looked up in host memory; a table that is the head's too is on the device
    nevertheless."""
    optimizer: str = "adamw"
    """`train.optimizer`."""
    offload_layers: int = 0
    """Decoder layers whose packed weights wait in host memory."""
    trains_head: bool = False
    """The output head is trained whole, in fp32; the model does not tie it to the embedding."""
    trains_embedding: bool = False
    """The same of the embedding, which is then on the device."""
    routers: tuple[str, ...] = ()
    """Paths within a layer of the routers that are trained whole, in fp32."""
    balances_routers: bool = False
    """The router's load-balancing loss is part of the loss."""
    cuda_graphs: bool = False
    """Micro-batches are to be CUDA graphs where they can be."""

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_len

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
            f"attention by {self.attention}": self.attention not in ("flash", "flex"),
        }
        return next((words for words, there in obstacles.items() if there), None)

    @property
    def graphed(self) -> bool:
        """Whether micro-batches are CUDA graphs."""
        return self.cuda_graphs and self.graph_obstacle is None

    @property
    def fixed_terms(self) -> dict[str, int]:
        """What the device adds to every phase, bytes. cuBLAS has workspaces for each stream, and
        graphs are captured on one of their own.
        """
        streams = 2 if self.graphed else 1
        return {name: streams * size for name, size in self.fixed.items()}

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

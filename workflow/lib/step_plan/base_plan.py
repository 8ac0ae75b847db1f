"""The parts of a step that are no memory options: processes, rows, dtypes, adapters."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Strict

from workflow.lib.kernels.attention.answer_rows import AnswerRows, LengthGroup
from workflow.lib.kernels.attention.attention_choice import FLEX, VARLEN
from workflow.lib.model.loss.vocabulary_slices import vocabulary_slices
from workflow.lib.settings.objectives import NEEDS, ObjectiveName
from workflow.lib.settings.train import ALL_LINEARS
from workflow.lib.system.dtype_choice import COMPUTE_DTYPE

AttentionKind = Literal["flash", "flex", "sdpa", "eager"]
Names = Annotated[tuple[str, ...], Strict(False)]  # JSON has lists
Lengths = Annotated[tuple[LengthGroup, ...], Strict(False)]
SUPERVISED: ObjectiveName = "sft"


@dataclass(frozen=True, kw_only=True)
class BasePlan:
    """The part of a plan that follows from settings, model and machine."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    device: str = "cuda"  # `cuda` or `cpu`
    processes: int  # of all nodes together, one for each GPU
    nodes: int = 1  # machines that share the processes equally
    context_parallel: int = 1  # neighbouring processes that share the tokens of each row
    replicas: int = 1  # copies of the model, each sharded over its own part of the processes
    micro_batch_size: int  # rows of a process, or of those that share them, and forward pass
    accumulation_steps: int = 1  # micro-batches of a process and optimizer step
    seq_len: int  # tokens of a row
    documents_per_row: float = 1.0
    """Packed documents of a row, on average. Kernels and CUDA graphs have padding for each."""
    document_lengths: Lengths = ()  # of all rows' documents and padding; empty: all are equal
    compute_dtype: str = "bfloat16"  # of activations: `bfloat16`, `float16` or `float32`
    attention: str = VARLEN
    """Implementation of attention, by the name that Transformers knows it by."""
    attention_dropout: bool = False
    """Attention weights are dropped, by the share of the model's family."""
    matmul_dtype: str = COMPUTE_DTYPE
    """Of matmuls with frozen weights in training steps: `compute_dtype` or `float8`."""
    matmul_passes: str = "both"  # the passes with this dtype: `forward`, `backward` or `both`
    objective: ObjectiveName = SUPERVISED  # `train.objective`
    shares_prompts: bool = False
    """The documents of an example share their prompt, if the model's attention can."""
    answer_rows: AnswerRows | None = None
    """The rows of pairs and groups; null: they are full of trained tokens, like all others."""
    start_reference: bool = False
    """The objective's reference is the start of the training: its trained values are in host
    memory."""
    top_k: int = 0  # tokens of a teacher's scores at each position; 0 without a teacher
    optimizer: str = "adamw"  # `train.optimizer`
    rank: int  # of the adapters, unless `ranks` has another
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of targets that differ from `rank`, by name; the largest of all layers."""
    targets: Names  # names of the adapted linears
    dora: bool = False  # adapters are DoRA's
    dropout: float = 0.0  # dropped share of the adapters' inputs
    trains_head: bool = False
    """The output head is trained whole, in fp32; the model does not tie it to the embedding."""
    trains_embedding: bool = False  # the same of the embedding, which is then on the device
    routers: Names = ()  # paths within a layer of the routers that are trained whole, in fp32
    balances_routers: bool = False  # the routers' load-balancing loss is part of the loss
    kept: Names = ()  # linears in 16 bits: expressions of `quantize.keep`
    block_size: int = 64  # weights of an NF4 block
    double_quant: bool = True  # scales of NF4 blocks are quantized too

    @property
    def tokens(self) -> int:
        """T: tokens of a process's micro-batch."""
        return self.micro_batch_size * self.slice_tokens

    @property
    def sharers(self) -> str:
        """The processes that share a row, to follow the rows of a micro-batch in words."""
        return f" over {self.context_parallel} processes" if self.context_parallel > 1 else ""

    @property
    def slice_tokens(self) -> int:
        """Tokens of a row that a process has."""
        return -(-self.seq_len // self.context_parallel)

    @property
    def forward_passes(self) -> int:
        """Of a micro-batch in a step: the last has a backward, others are of reference and
        estimate."""
        return 1 + NEEDS[self.objective].forward_first + self.start_reference

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.accumulation_steps > 1

    @property
    def decodes(self) -> bool:
        """Whether matmuls of training steps decode or round frozen weights."""
        return self.kept != ALL_LINEARS or self.matmul_dtype != COMPUTE_DTYPE

    @property
    def compute_bytes(self) -> int:
        return 4 if self.compute_dtype == "float32" else 2

    @property
    def attention_kind(self) -> AttentionKind:
        """The attention's use of memory."""
        if self.attention.startswith((VARLEN, "flash")):
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
    def shards(self) -> int:
        """P: processes that share one copy of the model."""
        return self.processes // self.replicas

    @property
    def row_groups(self) -> int:
        """Groups of processes with rows of their own."""
        return self.processes // self.context_parallel

    @property
    def slices(self) -> int:
        """G: neighbouring processes that share embedding and head."""
        return vocabulary_slices(self.shards)

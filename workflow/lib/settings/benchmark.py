"""Settings of the benchmark: what is measured, on what shape."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workflow.lib.settings.effects import Affects
from workflow.lib.settings.section_base import Name, Section


class BenchmarkConfig(Section):
    """The benchmark of the training engine: shape, batch, and the cases that are measured."""

    affects: ClassVar = Affects("result", read_by=("benchmark_run",))

    model: str = Field("workflow/resources/base", min_length=1)
    """Shape of the model: a shipped one (`meta-llama/Llama-2-70b-hf`; all:
    `workflow/resources/models/shapes.json`), or a folder with a config.json. Its weights are
    random: speed and memory do not depend on them."""
    layers: int | None = Field(None, ge=1, le=4096)
    """Decoder layers; null = as many as the model has."""
    vocab_size: int | None = Field(None, ge=2, le=2**24)
    """Rows of embedding and head; null = as many as the model has."""
    seq_len: int = Field(256, ge=8, le=2**20)
    """Length of a row, tokens."""
    micro_batch_size: int = Field(2, ge=1, le=2**20)
    """Rows per process and forward pass."""
    accumulation: int = Field(1, ge=1, le=2**16)
    """Micro-batches of a step."""
    documents: int = Field(1, ge=1, le=2**19)
    """Documents packed into a row, each of at least 4 tokens."""
    rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapter, on all linear layers."""
    steps: int = Field(6, ge=1, le=10_000)
    """Optimizer steps of a case; speed is that of the last two thirds together."""
    device: Literal["auto", "cpu"] = "auto"
    """Where it runs; `auto` = on the GPUs, if any is visible."""
    processes: tuple[int, ...] | Literal["auto"] = "auto"
    """Numbers of processes (one GPU each) that every case is measured with, for weak scaling;
    `auto` = all visible GPUs; 2 on a CPU."""
    memory_cap_gib: float | None = Field(None, gt=0.0, le=4096.0)
    """What PyTorch may reserve of each GPU, GiB, to emulate a smaller card; null = all of it. CUDA
    and NCCL take 0.8 to 1.6 GiB beside it."""
    check_bytes: bool = True
    """Compare every gathered tensor with the checkpoint before the first step, as a training run
    does."""
    profile: bool = False
    """Record one step more, by torch's profiler: where its time goes, by kinds of kernels."""
    checkpoint_pairs: int = Field(0, ge=0, le=1000)
    """Also measure what a checkpoint costs: so many pairs of blocks of `steps` steps, one of each
    pair with a checkpoint; 0 = no."""
    cases: tuple[Name, ...] | Literal["all"] = (
        "fsdp",
        "checkpointing",
        "flash",
        "no_recomputation",
    )
    """Cases of the list by name, in this order; `all` = all of them."""
    cases_file: str | None = Field(None, min_length=1)
    """The list of cases; null = `workflow/resources/benchmark/cases.yaml`, whose head says what a
    case is."""
    peers: bool = False
    """Also measure the other software of the list (`envs/peers.txt`); what is not installed is told
    in its row."""

    @model_validator(mode="after")
    def _sizes(self) -> "BenchmarkConfig":
        if self.documents > self.seq_len // 4:
            raise ValueError(
                f"documents = {self.documents}: a row of seq_len = {self.seq_len} tokens holds at "
                f"most {self.seq_len // 4}. Lower it"
            )
        counts = () if self.processes == "auto" else self.processes
        if self.processes != "auto" and (not counts or not all(1 <= n <= 4096 for n in counts)):
            raise ValueError(
                f"processes = {list(counts)}: must be numbers of 1 to 4096. Set auto to use all "
                "visible GPUs"
            )
        if not self.cases:
            raise ValueError("cases = []: there is nothing to measure. Name cases, or set all")
        return self

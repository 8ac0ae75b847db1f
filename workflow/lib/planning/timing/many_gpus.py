"""Seconds of a step on many GPUs: `step_time`'s compute, and what must travel between GPUs
meanwhile.

Compute and 2 GPUs over NVLink are held against measurements
(tests/planning/timing/test_calibration.py); the fabrics beyond are data sheets and assumptions, and
are called so. What travels, `gpu_traffic` says.
`python -m workflow.scripts.write_scaling_page` writes workflow/docs/scaling.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_shape
from workflow.lib.planning.memory import closed_form
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.timing.gpu_traffic import Fabric, micro_batch_traffic
from workflow.lib.planning.timing.step_time import constants_of, gpu_parts
from workflow.lib.planning.timing.step_work import micro_batch_work
from workflow.lib.system.gpu_models import BY_NAME, GpuModel
from workflow.lib.system.units import GIB

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "scaling.md"

# NVLink 4 of HGX H100: 900 GB/s in both directions together (NVIDIA H100 data sheet); one 400 Gb/s
# InfiniBand port for each GPU; or one Ethernet port for the node.
INFINIBAND = Fabric("NVLink + InfiniBand, 8 x 400 Gb/s a node", 8, 450e9, 400e9)
ETHERNET_400 = Fabric("NVLink + Ethernet, 400 Gb/s a node", 8, 450e9, 50e9)
ETHERNET_100 = Fabric("NVLink + Ethernet, 100 Gb/s a node", 8, 450e9, 12.5e9)
FABRICS = (INFINIBAND, ETHERNET_400, ETHERNET_100)


@dataclass(frozen=True)
class Step:
    """A step of one micro-batch: seconds of compute alone and of the whole, and its tokens over all
    GPUs.
    """

    compute_s: float
    step_s: float
    tokens: int

    @property
    def efficiency(self) -> float:
        """Share of the step in which the GPUs compute."""
        return self.compute_s / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all GPUs per second."""
        return self.tokens / self.step_s


def predict_step(shape: ModelShape, setup: Setup, gpu: GpuModel, fabric: Fabric) -> Step:
    """Predict a step of one micro-batch whose every token is trained."""
    work = micro_batch_work(shape, setup, trained_share=1.0)
    traffic = micro_batch_traffic(shape, setup, fabric)
    parts = gpu_parts(work, gpu, constants=constants_of(gpu), traffic=traffic)
    step_s = sum(parts.values())
    return Step(
        compute_s=step_s - parts["waiting_for_other_gpus"],
        step_s=step_s,
        tokens=setup.tokens * setup.processes,
    )


def example_shape() -> ModelShape:
    """Return the shape of Llama 3.1 405B."""
    shape = known_shape(EXAMPLE_MODEL)
    assert shape is not None, "the catalog has lost the example"
    return shape


def example_setup(shape: ModelShape, *, processes: int, shards: int) -> Setup:
    """Return the set-up of the document: rank 16 everywhere, 2 rows of 2,048 tokens a GPU, all
    layers recomputed.
    """
    return Setup(
        processes=processes,
        replicas=processes // shards,
        micro_batch_size=2,
        seq_len=2048,
        rank=16,
        targets=shape.linear_names,
        dropout=False,
        block_size=64,
        double_quant=True,
        activation_checkpointing=True,
        reshard_after_forward=True,
        accumulates=False,
        compute_bytes=2,
        attention="flash",
        offload_embedding=True,
        fixed={"cublas_workspace": closed_form.CUBLAS_BYTES},
    )


EXAMPLE_MODEL = "meta-llama/Llama-3.1-405B-Instruct"
EXAMPLE_GPU = "NVIDIA H100 80GB HBM3"
EXAMPLE_COUNTS = (8, 16, 32, 64, 128, 256, 512)
HEAD = """# Scaling: what many GPUs would bring

Written by `python -m workflow.scripts.write_scaling_page`; a test fails when it is out of date.

**Predicted, not run.** The compute is the time model of `preflight` (constants measured on H200).
The traffic model agrees within 10% with every timing of more than one GPU in which the GPU
decided: 2, 4 and 8 x H200 over NVLink (`tests/gpu/measurements`, held against it by
`tests/planning/timing/test_calibration.py`; 8 layers of 70B width kept 96.5% of the speed of 2
GPUs on 8). InfiniBand and Ethernet were never measured: links at 80% of their data sheets, a
ring's step 2 us inside a node and 10 us between nodes, both assumed.

Llama 3.1 405B in NF4, LoRA r = 16 on all seven linears, H100 80 GB in nodes of 8, 2 rows of 2,048
tokens per GPU and step, every layer recomputed. *FSDP* shards the model over all GPUs
(`hardware.shard_size: auto`), *HSDP* over the 8 of a node (`hardware.shard_size: 8`), and the
nodes train as replicas. Efficiency: share of the step in which GPUs compute.
"""
FOOT = """
## How to read it
- HSDP sends only the adapters' gradients between nodes (2.5 GB for all of the model, twice a
  step), so even slow Ethernet keeps up. Its price is memory: a node holds the whole model. Take
  it as soon as the model fits into one node.
- FSDP over all nodes sends the whole NF4 model through every node's network twice a step. With
  InfiniBand that hides behind compute at this batch; with Ethernet it decides the step. A larger
  micro-batch, or accumulation over the same gathers, would help as far as memory allows.
- The global batch grows with the GPUs here. At a fixed global batch the rows per GPU shrink
  instead, and efficiency with them.
- 100% says that everything this model knows of can hide behind compute. Stragglers, jitter and
  other users of a network, which it does not know, take their share on every large machine.
- Loading, checkpoints and evaluation are not counted.

## What was simulated
`tests/planning/timing/test_many_gpus.py` builds the sharding of this model (all 126 layers, on
the meta device) as rank 0 of 512 processes in PyTorch's fake process group, by the same `shard_`
that training calls, and compares the bytes of its parameters with what the memory model counts;
HSDP, and rank 511, with its first layers. `tests/workflow/test_sweep_plan.py` lets Snakemake plan
a sweep of 1,000 runs.
"""


def document() -> str:
    """Return the text of `docs/scaling.md`."""
    tables = (_table(fabric) for fabric in FABRICS)
    return HEAD + "".join(f"\n{table}\n" for table in tables) + FOOT


def _table(fabric: Fabric) -> str:
    head = (
        f"## {fabric.name}\n\n"
        "| GPUs | FSDP: s/step | tokens/s | efficiency | peak, GiB | HSDP: s/step | tokens/s | "
        "efficiency | peak, GiB |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(_rows(fabric))


def _rows(fabric: Fabric) -> Iterator[str]:
    shape, gpu = example_shape(), BY_NAME[EXAMPLE_GPU]
    whole = example_setup(shape, processes=EXAMPLE_COUNTS[0], shards=EXAMPLE_COUNTS[0])
    for count in EXAMPLE_COUNTS:
        fsdp = replace(whole, processes=count)
        hsdp = replace(whole, processes=count, replicas=count // fabric.gpus_per_node)
        cells = [_cells(shape, setup, gpu, fabric) for setup in (fsdp, hsdp)]
        yield f"| {count} | {' | '.join(cells)} |"


def _cells(shape: ModelShape, setup: Setup, gpu: GpuModel, fabric: Fabric) -> str:
    step = predict_step(shape, setup, gpu, fabric)
    peak = closed_form.predict(shape, setup).peak_bytes / GIB
    return f"{step.step_s:.1f} | {step.tokens_per_s:,.0f} | {step.efficiency:.0%} | {peak:.1f}"

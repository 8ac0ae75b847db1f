"""The engine's own steps on the recorded GPU: a model is built as for training, checked as at the
start, and trained for two steps.

The second step is the first that begins as all others do, with what the allocator has kept. Every
row is full and one document, and every token is trained. What the start-up checks compare on the
host, and the family's own forward of 8 tokens, are left out.
"""

import gc
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from workflow.lib.artifacts.preflight_record import Plan
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.model.decoder_layers import drop_other_parts_
from workflow.lib.model.layers.nf4_linear import NF4Spec
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import allocate_, build_on_meta, replace_linears_
from workflow.lib.model.trained_modules import sum_copies_
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_step import CHECKS, LOAD, STEPS
from workflow.lib.quantization.nf4_checkpoint import quantizable_linears
from workflow.lib.recording.allocation_recorder import AllocationRecorder
from workflow.lib.recording.phases import Phases
from workflow.lib.recording.recorded_gpu import recorded_gpu
from workflow.lib.settings.config import LoraSettings, TrainConfig
from workflow.lib.system.compute_choice import VARLEN
from workflow.lib.system.device_types import RECORDED
from workflow.lib.training.build import TrainingModel, adapt_, lay_out_
from workflow.lib.training.loop import backward, clip_gradients, make_optimizer
from workflow.lib.training.optimizers import ShardwiseAdam

# `flash` stands for all kernels without a matrix of scores; torch's own needs no further package.
ATTENTION = {"flash": VARLEN, "sdpa": "sdpa", "eager": "eager"}
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Request:
    """What is to be recorded."""

    config: Mapping[str, Any]
    """A config.json."""
    setup: Setup
    window_bytes: int | None
    """Offloaded activations that are on the device at a time; None where none are offloaded."""
    checked: bool = True
    """After the start-up checks, whose freed memory the allocator keeps."""


def record(request: Request) -> Tape:
    """Return what a process asks of a GPU's allocator from the empty model to the end of its second
    step.

    This process has the recorded device from then on, and must have no process group. Raises
    `UserError` as building a model does.
    """
    gpu, tape = recorded_gpu(), Tape()
    with _fake_world(request.setup) as world:
        run = _Run(request, world)
        with _one_thread(), gpu.mode, AllocationRecorder(gpu, tape) as recorder:
            run.load(recorder)
            if request.checked:
                tape.phase(CHECKS)
                run.check()
            tape.phase(LOAD)
            optimizer = make_optimizer(run.training, TrainConfig(optimizer=request.setup.optimizer))
            run.training.train()
            for _ in range(STEPS):
                with _no_garbage():
                    run.step(optimizer, tape)
    return tape


def _one_thread() -> AbstractContextManager[None]:
    """Run backward in the thread that asks for it. In one of its own, what autograd uses last is
    released sooner or later than what that thread does next, as chance has it.
    """
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage before the block and never in it: when Python does is left to chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _fake_world(setup: Setup) -> Iterator[World]:
    """Be the first of the setup's processes, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=setup.processes, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    try:
        yield World(0, setup.processes, torch.device(RECORDED, 0), _mesh(setup), group)
    finally:
        dist.destroy_process_group()


def _mesh(setup: Setup) -> DeviceMesh:
    if setup.replicas == 1:
        return init_device_mesh(RECORDED, (setup.processes,), mesh_dim_names=("shard",))
    sizes = (setup.replicas, setup.shards)
    return init_device_mesh(RECORDED, sizes, mesh_dim_names=("replicate", "shard"))


class _Run:
    """A model without weights, and what is done with it."""

    def __init__(self, request: Request, world: World) -> None:
        setup = request.setup
        self._setup, self._world, self._dtype = setup, world, DTYPES[setup.compute_bytes]
        model = _nf4_model(request.config, setup)
        plan = _plan(request)
        self.training, _ = adapt_(model, _lora(setup), plan, fused_layers=setup.fused_layers)
        self.training.multiply_in_(setup.products, setup.products_in)
        self._embedding: Any = model.get_input_embeddings()
        self._laid_out: TrainingModel = lay_out_(self.training, plan, world)

    def load(self, recorder: AllocationRecorder) -> None:
        """Allocate what training builds, without values."""
        recorder.tape.phase(LOAD)
        allocate_(self.training, device=self._world.device)
        if self._laid_out.offloaded_layers:
            self._laid_out.offloaded_layers.allocate_()
        if self._setup.offload_embedding:
            self.training.rows_of = self._embedding_rows
        Phases(recorder.tape).follow_(self.training, self._embedding)

    def check(self) -> None:
        """What the start-up checks do on the device: a forward of one row, and every unit
        gathered.
        """
        self.training.eval()
        with forward_only(self.training):
            self.training(self._batch(1))
        for unit in self._laid_out.units:
            unit.unshard()
            unit.reshard()

    def step(self, optimizer: ShardwiseAdam, tape: Tape) -> None:
        """Take a step as `loop.Trainer` does."""
        training, device = self.training, self._world.device
        count = 2 if self._setup.accumulates else 1
        batches = (self._batch(self._setup.micro_batch_size) for _ in range(count))
        with training.adapters.unchanged(), training.product_types.in_eight_bits():
            loss = backward(training, batches, trained_tokens=1, factor=1.0, device=device)
        tape.phase("optimizer_step")
        sum_copies_(training)
        norm = clip_gradients(optimizer, max_norm=1.0)
        dist.all_reduce(loss)
        optimizer.begin(unless=~(loss.isfinite() & norm.isfinite() & (norm > 0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _batch(self, rows: int) -> MicroBatch:
        """Rows of one document each, all of whose tokens are trained; on the device."""
        ids = torch.zeros(rows, self._setup.seq_len, dtype=torch.int64)
        batch = MicroBatch(
            input_ids=ids,
            position_ids=torch.zeros_like(ids),
            positions=torch.zeros_like(ids.flatten()),
            targets=torch.zeros_like(ids.flatten()),
            bounds=(torch.zeros(rows + 1, dtype=torch.int32), self._setup.seq_len),
            row_keys=torch.zeros(rows, dtype=torch.int64),
        )
        if self._setup.offload_embedding:
            batch = replace(batch, embedded=self._embedding_rows(ids.flatten()))
        return batch.to(self._world.device)

    def _embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (n, hidden) of ids (n,), as they come from host memory."""
        width: int = self._embedding.embedding_dim
        return torch.empty(len(ids), width, dtype=self._dtype, device=ids.device)


def _nf4_model(config: Mapping[str, Any], setup: Setup) -> PreTrainedModel:
    """Return the NF4 model of a config.json on meta, as if a base of it had been quantized."""
    dtype = DTYPES[setup.compute_bytes]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        model = build_on_meta(Path(folder), dtype=dtype, attention=ATTENTION[setup.attention])
    drop_other_parts_(model)
    specs = {
        path: NF4Spec(size, setup.block_size, setup.double_quant, offset=0.0)
        for path, size in quantizable_linears(model).items()
    }
    return replace_linears_(model, specs, compute_dtype=dtype)


def _lora(setup: Setup) -> LoraSettings:
    modules = [("lm_head", setup.trains_head), ("embed_tokens", setup.trains_embedding)]
    return LoraSettings(
        r=setup.rank,
        target_modules=setup.targets,
        rank_pattern=dict(setup.ranks),
        dropout=0.05 if setup.dropout else 0.0,  # whatever the share is
        use_dora=setup.dora,
        modules_to_save=tuple(name for name, trained in modules if trained),
    )


def _plan(request: Request) -> Plan:
    setup = request.setup
    return Plan(
        device=RECORDED,
        processes=setup.processes,
        nodes=1,
        shard_size=setup.shards,
        micro_batch_size=setup.micro_batch_size,
        accumulation_steps=2 if setup.accumulates else 1,
        activation_checkpointing=setup.activation_checkpointing,
        offload_activations=setup.offload_activations,
        offload_window_bytes=request.window_bytes,
        reshard_after_forward=setup.reshard_after_forward,
        offload_embedding=setup.offload_embedding,
        offload_layers=setup.offload_layers,
        gpu_memory_bytes=None,
        compute_dtype=str(DTYPES[setup.compute_bytes]).removeprefix("torch."),
        num_steps=STEPS,
    )

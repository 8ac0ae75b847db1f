"""The engine's own steps on the recorded GPU: a model is built as for training, checked as at the
start, and trained for two steps by `training.loop.Trainer`.

The second step is the first that begins as all others do, with the allocator's cached memory. Every
row is full, and every token is trained. Left out are the start-up checks' comparisons on the host,
and the family's own forward of 8 tokens."""

import gc
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers, drop_other_parts_
from workflow.lib.distributed.world import World, context_group, process_mesh
from workflow.lib.kernels.attention.flex_masks import RECORDED_LENGTHS
from workflow.lib.model.adaptable_linears import mark_kept_, note_without_adapter_, weight_shapes
from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.host_embedding import other_tables
from workflow.lib.model.layers.rotary_by_document import RotaryByDocument
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import allocate_
from workflow.lib.model.recomputation import recompute_without_draws_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.planning.memory.allocation_tape import CHECKS, LOAD, Tape
from workflow.lib.planning.work import UPDATE
from workflow.lib.quantization.nf4_checkpoint import packed_on_meta
from workflow.lib.recording.allocation_recorder import AllocationRecorder
from workflow.lib.recording.layer_tape import NONE, LayerTape, Phases
from workflow.lib.recording.recorded_batches import RecordedBatches
from workflow.lib.recording.recorded_gpu import RecordedCapture, recorded_gpu
from workflow.lib.recording.repeat_layers import (
    NotRepeatableError,
    keep_layers_,
    layer_kinds,
    repeated,
    representatives,
)
from workflow.lib.recording.term_names import module_tensors, name_terms
from workflow.lib.settings.config import LoraSettings, TrainConfig
from workflow.lib.settings.objectives import DistillConfig, GrpoConfig, PreferencesConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.device_types import RECORDED
from workflow.lib.training.build import assemble_, complete_, dtype_of
from workflow.lib.training.loop import PendingScalars, StepInProgress, Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import Layout, MicroBatchGraphs
from workflow.lib.training.start_reference import token_losses

# Reach of layers to each other, tried in this order until equal layers make equal requests. With
# gathered layers the third one requests the buffer of the first, which no layer of the same pass
# releases.
NEAR, GATHERED, FAR = 2, 3, 4

logger = logging.getLogger("workflow")


def record(
    config: Mapping[str, Any], plan: StepPlan, *, checked: bool = True, whole: bool = False
) -> Tape:
    """Return the allocations of a process from the empty model to the end of its second step.
    config: a config.json; checked: after the start-up checks, whose freed memory the allocator
    keeps; whole: run all layers, not only representatives. This process keeps the recorded device,
    and must have no process group. Raises `UserError` as building a model does."""
    described = _Described.of(config, plan)
    tape = None if whole else _repeated(described, checked=checked)
    if tape is None:
        tape = _run(described, range(len(described.kinds)), checked=checked)
    name_terms(tape)
    return tape


def _repeated(described: "_Described", *, checked: bool) -> Tape | None:
    """Return the tape made from some layers; None if all are needed."""
    for reach in _reaches(described):
        numbers = representatives(described.kinds, reach=reach)
        if len(numbers) == len(described.kinds):
            break
        tape = _run(described, numbers, checked=checked)
        kinds = [described.kinds[number] for number in numbers]
        try:
            return repeated(tape, kinds, described.kinds, reach=reach)
        except NotRepeatableError as error:
            logger.debug("layers %s do not stand for all: %s", numbers, error)
    return None


def _reaches(described: "_Described") -> Sequence[int]:
    """Return the possible reaches of layers to each other, the least first."""
    # Offloaded activations of some layers exist at once. With several layers' weights on the host,
    # one replaces an earlier one.
    plan = described.plan
    if plan.offload_window_bytes is not None or len(described.choice.weights_on_host) > 1:
        return (FAR,)
    return (GATHERED if plan.shards > 1 else NEAR, FAR)


def _run(described: "_Described", numbers: Sequence[int], *, checked: bool) -> LayerTape:
    """Record a model of these layers alone."""
    gpu, tape, plan = recorded_gpu(), LayerTape(), described.plan
    with _masks_of_rows(packed=plan.documents_per_row > 1), _fake_world(plan) as world:
        run = _Run(described, numbers, world, tape)
        RECORDED_LENGTHS.set(run.batches.document_lengths)
        alone = plan.processes > 1 == plan.shards
        # In a backward thread of its own, the order of autograd's last releases and the thread's
        # next requests is random.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with (
            one_thread,
            gpu.mode,
            gpu.is_accelerator(),
            AllocationRecorder(gpu, tape, alone=alone) as recorder,
        ):
            run.load(recorder)
            if checked:
                tape.phase(CHECKS)
                run.check(recorder)
            tape.phase(LOAD)
            trainer = run.trainer()
            num_steps = run.batches.num_steps
            steps = trainer.steps(first_step=0, num_steps=num_steps)
            for _ in range(num_steps):
                with _no_garbage():
                    next(steps)
            steps.close()
            tape.end()  # with the trainer's moments and graphs, which stay
    tape.work = tape.work_of(dict.fromkeys(range(len(numbers)), 1))
    return tape


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage before the block and never in it: the time of Python's own is random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _fake_world(plan: StepPlan) -> Iterator[World]:
    """Be the first of the plan's processes, with collectives that do nothing."""
    dist.init_process_group("fake", rank=0, world_size=plan.processes, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    try:
        mesh = process_mesh(RECORDED, size=plan.processes, shard_size=plan.shards)
        context = context_group(
            RECORDED, size=plan.processes, context_parallel=plan.context_parallel
        )
        yield World(0, plan.processes, torch.device(RECORDED, 0), mesh, group, context)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class RecordedTrainer(Trainer):
    """The trainer, with the phases of its steps on the tape. Work is counted in the last step."""

    tape: LayerTape = field(kw_only=True)
    num_steps: int = field(kw_only=True)

    def run_micro_batches(self, current: StepInProgress, *, count: int | None = None) -> None:
        """Run them; then the phase of the update begins."""
        super().run_micro_batches(current, count=count)
        self.tape.phase(UPDATE)
        self.tape.counts = current.rows.step == self.num_steps - 1
        self.tape.follows_tensors = True

    def transfer(self, *numbers: torch.Tensor) -> PendingScalars:
        """Begin the transfer; a few numbers are no work."""
        counts, self.tape.counts = self.tape.counts, False
        pending = super().transfer(*numbers)
        self.tape.counts = counts
        return pending


class RecordedGraphs(MicroBatchGraphs):
    """Graphs whose release frees their pages on the tape."""

    def __init__(self, training: CausalLMForTraining, world: World, tape: LayerTape) -> None:
        super().__init__(training, world, partial(RecordedCapture, tape))
        self._tape = tape

    def _layout(self, batch: MicroBatch) -> Layout | None:
        """Return the layout of a micro-batch; a mean one has none."""
        if not self._tape.averages:
            return super()._layout(batch)
        self.release()
        return None

    def release(self) -> None:
        """Drop the graphs, and free their memory."""
        held = self._capture is not None
        super().release()
        if held:
            self._tape.empty_cache()


class _Run:
    """A model without weights, from its load to its trainer."""

    def __init__(
        self, described: "_Described", numbers: Sequence[int], world: World, tape: LayerTape
    ) -> None:
        plan = described.plan
        self._plan, self._world, self._tape = plan, world, tape
        model = _frozen_model(described.config, plan, numbers)
        self._layers = decoder_layers(model)  # adapters and FSDP2 change their classes
        self._other_tables = other_tables(model)
        self._assembled = assemble_(
            model,
            plan,
            world,
            lora=_lora(plan),
            objective=objective_of(
                plan.objective, PreferencesConfig(), DistillConfig(), GrpoConfig()
            ),
            router_aux_loss_coef=1.0 if plan.balances_routers else 0.0,
            choice=described.choice.among(numbers),
        )
        self._training = self._assembled.training
        recompute_without_draws_(self._layers)
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        looks_up = not len(cast(torch.Tensor, self._embedding.weight))
        self._rows_of = self._embedding_rows if looks_up else None
        self.batches = RecordedBatches(self._training, plan, tape, world, self._rows_of)

    def load(self, recorder: AllocationRecorder) -> None:
        """Allocate the tensors of training, without values."""
        training, device = self._training, self._world.device
        self._tape.phase(LOAD)
        allocate_(training, device=device)
        for module in training.modules():
            if isinstance(module, RotaryByDocument):
                module.copies(device)
        for number, layer in enumerate(self._layers):
            for tensor in (*layer.parameters(), *layer.buffers()):
                recorder.assign(tensor, layer=number)
        tables = (self._embedding, self._head, *self._other_tables)
        for tensor, term in module_tensors(training, tables):
            recorder.assign(tensor, term=term)
        if packed := self._assembled.packed_layers:
            packed.allocate_()
            for number, own_slice in packed.slices.items():
                recorder.assign(own_slice, layer=number, term="nf4_weights")
        complete_(training, self._plan, rows_of=self._rows_of)
        Phases(self._tape).follow_(training, self._embedding, self._layers)

    def check(self, recorder: AllocationRecorder) -> None:
        """Run the start-up checks' work on the device: a forward of one row, all units gathered."""
        tape, training = self._tape, self._training
        token_losses(training, [self.batches.check_batch()], training.objective)
        tape.follows_tensors = False
        recorder.note_resized()
        for number, unit in enumerate(self._assembled.units):
            tape.layer = number if number < len(self._layers) else NONE
            unit.unshard()
            unit.reshard()
        if packed := self._assembled.packed_layers:
            for number in packed.slices:
                tape.layer = number
                with packed.gathered(number):
                    pass
        tape.layer = NONE
        tape.follows_tensors = True

    def trainer(self) -> Trainer:
        """Return the trainer of the plan's steps."""
        settings, training = TrainConfig(optimizer=self._plan.optimizer), self._training
        graphs = None
        if self._plan.graphed:
            # All processes have the same micro-batches, so none exchanges them.
            graphs = RecordedGraphs(training, replace(self._world, size=1), self._tape)
        optimizer = make_optimizer(training, settings)
        return RecordedTrainer(
            *(training, optimizer, self.batches, settings, self._world, graphs),
            tape=self._tape,
            num_steps=self.batches.num_steps,
        )

    def _embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (n, hidden) of ids (n,), as read from host memory."""
        width: int = self._embedding.embedding_dim
        return torch.empty(len(ids), width, dtype=dtype_of(self._plan), device=ids.device)


@dataclass(frozen=True)
class _Described:
    """A model and a plan: the layers of the plan's options, and each layer's kind."""

    config: Mapping[str, Any]
    plan: StepPlan
    choice: LayerChoice
    kinds: list[int]

    @staticmethod
    def of(config: Mapping[str, Any], plan: StepPlan) -> "_Described":
        model = _stock_model(config, plan)
        choice = plan.layers(len(decoder_layers(model)))
        return _Described(config, plan, choice, layer_kinds(model, choice))


@contextmanager
def _masks_of_rows(*, packed: bool) -> Iterator[None]:
    """Let Transformers make the masks of `sdpa` as for rows with values."""
    AttentionMaskInterface.register("sdpa", partial(_sdpa_mask, packed=packed))
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", sdpa_mask)


def _sdpa_mask(
    *, packed: bool, use_vmap: bool = False, allow_is_causal_skip: bool = True, **others: Any
) -> torch.Tensor | None:
    """Return Transformers' mask of rows whose values say whether they are packed. From tensors
    without values it makes a mask for every row (5.23, `find_packed_sequence_indices`).

    use_vmap: the mask has its own rule beside causality, window and documents."""
    mask: torch.Tensor | None = sdpa_mask(
        use_vmap=use_vmap,
        allow_is_causal_skip=allow_is_causal_skip or not (packed or use_vmap),
        **others,
    )
    return mask


def _frozen_model(
    config: Mapping[str, Any], plan: StepPlan, numbers: Sequence[int]
) -> PreTrainedModel:
    """Return a model of some layers of a config.json on meta, as of a base."""
    model, dtype = _stock_model(config, plan), dtype_of(plan)
    keep_layers_(model, numbers)
    packing: Any = {"block_size": plan.block_size, "double_quant": plan.double_quant}
    return packed_on_meta(model, dtype=dtype, **packing)


def _stock_model(config: Mapping[str, Any], plan: StepPlan) -> PreTrainedModel:
    """Return the model of a config.json on meta, marked where it stays in 16 bits. FlashAttention's
    packages keep nothing for dropout, and the recorded replacement drops nothing."""
    drops = plan.attention_dropout and plan.attention in ("sdpa", "eager")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        model = Checkpoint(Path(folder)).build(
            dtype_of(plan), attention=plan.attention, attention_dropout=drops
        )
    note_without_adapter_(model)
    drop_other_parts_(model)
    if plan.kept:
        mark_kept_(model, kept_linears(plan.kept, weight_shapes(model)))
    return model


def _lora(plan: StepPlan) -> LoraSettings:
    tables = [("lm_head", plan.trains_head), ("embed_tokens", plan.trains_embedding)]
    return LoraSettings(
        r=plan.rank,
        target_modules=plan.targets,
        rank_pattern=dict(plan.ranks),
        dropout=plan.dropout,
        use_dora=plan.dora,
        modules_to_save=(*(name for name, trained in tables if trained), *plan.routers),
    )

"""The engine's own steps on the recorded GPU: a model is built as for training, checked as at the
start, and trained for two steps.

The second step is the first that begins as all others do, with the allocator's cached memory. Every
row is full, and every token is trained. Left out are the start-up checks' comparisons on the host,
and the family's own forward of 8 tokens."""

import gc
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from workflow.lib.checkpoints.decoder_layers import decoder_layers, drop_other_parts_
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World, process_mesh
from workflow.lib.kernels.attention.document_lengths import equal_lengths
from workflow.lib.kernels.attention.flex_masks import RECORDED_LENGTHS
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.documents import documents_of
from workflow.lib.model.host_embedding import other_tables
from workflow.lib.model.layers.rotary_by_document import RotaryByDocument
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import allocate_, build_on_meta
from workflow.lib.model.recomputation import recompute_without_draws_
from workflow.lib.model.trained_modules import sum_copies_
from workflow.lib.model.training_module import loss_in
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.planning.memory.allocation_tape import CHECKS, LOAD, STEPS, Tape
from workflow.lib.quantization.nf4_checkpoint import packed_on_meta
from workflow.lib.recording.allocation_recorder import AllocationRecorder
from workflow.lib.recording.layer_tape import FIRST_PHASE, NONE, LayerTape, Phases
from workflow.lib.recording.recorded_gpu import RecordedCapture, recorded_gpu
from workflow.lib.recording.some_layers import (
    NotRepeatableError,
    keep_layers_,
    layer_kinds,
    repeated,
    representatives,
)
from workflow.lib.recording.term_names import module_tensors, name_terms
from workflow.lib.settings.config import LoraSettings, TrainConfig
from workflow.lib.settings.objectives import NEEDS, DistillConfig, PreferencesConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.device_types import RECORDED
from workflow.lib.training.build import TrainingModel, adapt_, dtype_of, lay_out_
from workflow.lib.training.gradients import LossSum, clip_gradients, is_healthy, step_estimate
from workflow.lib.training.loop import make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs, forward_backward
from workflow.lib.training.optimizers import ShardwiseOptimizer

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
    mean = equal_lengths(plan.seq_len / plan.documents_per_row)
    RECORDED_LENGTHS.set(plan.document_lengths or mean)
    with _masks_of_rows(packed=plan.documents_per_row > 1), _fake_world(plan) as world:
        run = _Run(described, numbers, world)
        alone = plan.processes > 1 == plan.shards
        # In a backward thread of its own, the order of autograd's last releases and the thread's
        # next requests is random.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with one_thread, gpu.mode, AllocationRecorder(gpu, tape, alone=alone) as recorder:
            run.load(recorder)
            if checked:
                tape.phase(CHECKS)
                run.check(recorder)
            tape.phase(LOAD)
            optimizer = make_optimizer(run.training, TrainConfig(optimizer=plan.optimizer))
            run.training.train()
            count = 2 if plan.accumulates else 1
            first = count if plan.graphed else 1  # graphs run their work once before the capture
            for number in range(STEPS):
                with _no_garbage():
                    some = count if number else first
                    run.step(optimizer, tape, micro_batches=some, last=number == STEPS - 1)
            tape.end()
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
        yield World(0, plan.processes, torch.device(RECORDED, 0), mesh, group)
    finally:
        dist.destroy_process_group()


class _Run:
    """A model without weights, and its steps."""

    def __init__(self, described: "_Described", numbers: Sequence[int], world: World) -> None:
        plan = described.plan
        self._plan, self._world, self._dtype = plan, world, dtype_of(plan)
        model = _nf4_model(described.config, plan, numbers)
        self._layers = decoder_layers(model)  # adapters and FSDP2 change their classes
        self._other_tables = other_tables(model)
        choice = described.choice.among(numbers)
        self.training, _ = adapt_(model, _lora(plan), plan, choice)
        self.training.objective = objective_of(
            plan.objective, PreferencesConfig(), DistillConfig(top_k=max(1, plan.top_k))
        )
        recompute_without_draws_(model)
        self.training.balance_routers_(1.0 if plan.balances_routers else 0.0)
        if plan.shares_prompts:
            self.training.share_prompts_()
        self._laid_out: TrainingModel = lay_out_(self.training, plan, world, choice)
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        # rows come from host memory
        self._looks_up = not len(cast(torch.Tensor, self._embedding.weight))
        self._graphs: MicroBatchGraphs | None = None

    def load(self, recorder: AllocationRecorder) -> None:
        """Allocate the tensors of training, without values."""
        recorder.tape.phase(LOAD)
        allocate_(self.training, device=self._world.device)
        for module in self.training.modules():
            if isinstance(module, RotaryByDocument):
                module.copies(self._world.device)
        for number, layer in enumerate(self._layers):
            for tensor in (*layer.parameters(), *layer.buffers()):
                recorder.assign(tensor, layer=number)
        tables = (self._embedding, self._head, *self._other_tables)
        for tensor, term in module_tensors(self.training, tables):
            recorder.assign(tensor, term=term)
        if packed := self._laid_out.packed_layers:
            packed.allocate_()
            for number, mine in packed.slices.items():
                recorder.assign(mine, layer=number, term="nf4_weights")
        if self._looks_up:
            self.training.rows_of = self._embedding_rows
        if self._plan.graphed:
            capture = partial(RecordedCapture, recorder.tape)
            # All processes have the same micro-batches, so none exchanges them.
            alone = replace(self._world, size=1)
            self._graphs = MicroBatchGraphs(self.training, alone, capture)
        Phases(recorder.tape).follow_(self.training, self._embedding, self._layers)

    def check(self, recorder: AllocationRecorder) -> None:
        """Run the start-up checks' work on the device: a forward of one row, all units gathered."""
        tape = recorder.tape
        self.training.eval()
        tape.follows_tensors = False
        with forward_only(self.training):
            self.training(self._batch(1).to(self._world.device))
            tape.layer = NONE
        recorder.note_resized()
        for number, unit in enumerate(self._laid_out.units):
            tape.layer = number if number < len(self._layers) else NONE
            unit.unshard()
            unit.reshard()
        if packed := self._laid_out.packed_layers:
            for number in packed.slices:
                tape.layer = number
                with packed.gathered(number):
                    pass
        tape.layer = NONE
        tape.follows_tensors = True

    def step(
        self, optimizer: ShardwiseOptimizer, tape: LayerTape, *, micro_batches: int, last: bool
    ) -> None:
        """Take a step as `loop.Trainer` does. Work is counted in the last one, of its last
        micro-batch."""
        training, device = self.training, self._world.device

        def made() -> Iterator[MicroBatch]:
            for number in range(micro_batches):
                tape.counts = last and number == micro_batches - 1
                tape.works_for = FIRST_PHASE  # before its begin: inputs are copied
                yield self._batch(self._plan.micro_batch_size)

        batches = made()
        if self._graphs is None:  # graphs copy them to the device
            batches = (batch.to(device) for batch in batches)
        if training.router_balance is not None:
            training.router_balance.begin_step_(divisor=1, tokens=1, device=device)
        tape.follows_tensors = False
        with training.adapters.unchanged(), training.matmul_precision.in_eight_bits():
            estimate = self._estimate(micro_batches)
            tape.layer = NONE
            run = self._graphs or partial(forward_backward, training, estimate=estimate)
            figures = len(training.objective.figures)
            losses = LossSum(run, divisor=1, factor=1.0, device=device, figures=figures)
            losses.add(batches)
            tape.layer = NONE  # derived tensors of adapters are freed now, of all layers
        tape.phase("optimizer_step")
        tape.counts = last
        tape.follows_tensors = True
        result = losses.value()
        sum_copies_(training)
        norm = clip_gradients(optimizer, max_norm=1.0)
        dist.all_reduce(result)
        possible = training.objective.may_stand_still((1.0,))
        optimizer.begin(unless=~is_healthy(loss_in(result), norm, may_stand_still=possible))
        optimizer.step()
        optimizer.zero_grad(set_to_none=self._graphs is None)
        tape.counts = False

    def _estimate(self, micro_batches: int) -> torch.Tensor | None:
        """Run the forward passes before a step."""
        device, training = self._world.device, self.training
        batches = (
            self._batch(self._plan.micro_batch_size).to(device) for _ in range(micro_batches)
        )
        return step_estimate(training, batches, divisor=1, world=self._world)

    def _batch(self, rows: int) -> MicroBatch:
        """Return rows of packed documents of equal lengths, all tokens trained, in host memory."""
        length, documents = self._plan.seq_len, self._documents(rows)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = MicroBatch(
            input_ids=ids,
            position_ids=torch.zeros_like(ids),
            positions=torch.zeros_like(ids.flatten()),
            targets=torch.zeros_like(ids.flatten()),
            bounds=(torch.tensor([0, *documents]).cumsum(0).to(torch.int32), max(documents)),
            row_keys=torch.zeros(rows, dtype=torch.int64),
            documents=documents_of(documents),
            lengths=torch.zeros(rows, dtype=torch.int64),
        )
        if self._looks_up:
            batch = replace(batch, embedded=self._embedding_rows(ids.flatten()))
        return self._of_objective(batch)

    def _of_objective(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the objective's inputs besides tokens."""
        plan, needs, tokens = self._plan, NEEDS[self._plan.objective], len(batch.positions)
        firsts = torch.arange(0, len(batch.bounds[0]) - 2, 2)
        if needs.examples != "texts":
            batch = replace(batch, firsts=firsts, step_sizes=torch.ones(3))
        if self.training.shares_prompts:
            batch = replace(batch, shared=_shared(batch))
        if needs.examples == "rated":
            batch = replace(batch, desirable=torch.zeros(len(firsts), dtype=torch.bool))
        if plan.top_k:
            ids = torch.zeros(tokens, plan.top_k, dtype=torch.int64)
            log_probs = torch.zeros(tokens, plan.top_k + 1)
            batch = replace(batch, teacher_ids=ids, teacher_log_probs=log_probs)
        elif needs.scores_of is not None:
            batch = replace(batch, reference=torch.zeros(tokens))
        return batch

    def _documents(self, rows: int) -> list[int]:
        """Return the lengths of the documents of some rows."""
        plan = self._plan
        count = min(math.ceil(rows * plan.documents_per_row), rows * plan.seq_len)
        of_rows = [count // rows + (row < count % rows) for row in range(rows)]
        return [
            plan.seq_len // of_row + (place < plan.seq_len % of_row)
            for of_row in of_rows
            for place in range(of_row)
        ]

    def _embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (n, hidden) of ids (n,), as read from host memory."""
        width: int = self._embedding.embedding_dim
        return torch.empty(len(ids), width, dtype=self._dtype, device=ids.device)


def _shared(batch: MicroBatch) -> SharedPrompts:
    """Return keys for as many tokens as rows can have, half of them prompts: at least as many as in
    any micro-batch."""
    places = torch.arange(batch.input_ids.numel())
    prompt = places[::2]
    return SharedPrompts(places, places, prompt, prompt, *batch.bounds)


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


def _nf4_model(
    config: Mapping[str, Any], plan: StepPlan, numbers: Sequence[int]
) -> PreTrainedModel:
    """Return a model of some layers of a config.json on meta, as of a quantized base."""
    model, dtype = _stock_model(config, plan), dtype_of(plan)
    keep_layers_(model, numbers)
    packing: Any = {"block_size": plan.block_size, "double_quant": plan.double_quant}
    return packed_on_meta(model, dtype=dtype, **packing)


def _stock_model(config: Mapping[str, Any], plan: StepPlan) -> PreTrainedModel:
    """Return the model of a config.json on meta. FlashAttention's packages keep nothing for
    dropout, and the recorded replacement drops nothing."""
    drops = plan.attention_dropout and plan.attention in ("sdpa", "eager")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        model = build_on_meta(
            Path(folder), dtype=dtype_of(plan), attention=plan.attention, attention_dropout=drops
        )
    drop_other_parts_(model)
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

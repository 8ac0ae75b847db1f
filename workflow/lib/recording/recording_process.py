"""Processes for recordings: the calling process needs no torch, or keeps its own unchanged."""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from workflow.lib.kernels.attention.attention_choice import RECORDED_FLASH, VARLEN
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.model_sizes import offload_window
from workflow.lib.planning.preflight.plan_search import NotRecordedError
from workflow.lib.recording.kept_tapes import keep_peaks, kept_or_made, known_peaks, recording_key
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.environment import importing
from workflow.lib.system.undocumented_interfaces import check_recordings
from workflow.lib.system.units import GIB

# Resident set of a process besides the model, measured on the CPU: 0.43 GiB after the imports, and
# 0.6 to 0.7 after some steps.
CPU_PROCESS_BYTES = int(0.7 * GIB)
MOST_AT_ONCE = 2  # of 1.5 GB each


class RecordingProcess:
    """Records plans, several at once: `processes` of the executor, which all start at the first
    request."""

    def __init__(self, executor: Executor, *, processes: int) -> None:
        self._executor = executor
        self._not_started = processes

    def record(
        self,
        config: Mapping[str, Any],
        plan: StepPlan,
        *,
        checked: bool = True,
        whole: bool = False,
    ) -> Tape:
        """Return the recording, as `engine_run.record`. Raises `NotRecordedError` if fake tensors
        cannot run it, and `UserError` as building a model does."""
        self._start()
        return self._executor.submit(
            _recorded, config, as_recorded(plan), checked=checked, whole=whole
        ).result()

    def peaks(
        self, config: Mapping[str, Any], plans: Sequence[StepPlan], *, checked: bool = True
    ) -> list[Peaks]:
        """Return the peaks of the recordings of plans; raises as `record` does."""
        if plans:
            self._start()
        futures = [
            self._executor.submit(_peaks, config, as_recorded(plan), checked=checked)
            for plan in plans
        ]
        return [each.result() for each in futures]

    def _start(self) -> None:
        """Let every process import the engine now, so that none does while a search waits."""
        while self._not_started:
            self._executor.submit(_import_engine)
            self._not_started -= 1


def _import_engine() -> None:
    _engine()


def _peaks(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> Peaks:
    return replay(_recorded(config, plan, checked=checked, whole=False)).peaks


def _recorded(config: Mapping[str, Any], plan: StepPlan, *, checked: bool, whole: bool) -> Tape:
    """Record in the process; torch's own errors become text, as some cannot be sent."""
    warnings.simplefilter("ignore", FutureWarning)  # deprecations inside packages
    record = _engine()
    try:
        return record(config, plan, checked=checked, whole=whole)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise NotRecordedError(
            "the engine's allocations cannot be recorded with this model "
            f"({type(error).__name__}: {reason})"
        ) from None


@cache
def _engine() -> Callable[..., Tape]:
    """Import the engine: in this process alone, as loading torch takes seconds."""
    # A recording collects garbage before each of its steps: searching the packages' objects would
    # take a third of its time.
    with importing():
        check_recordings()
        from workflow.lib.model.kernel_packages import compute_by_torch_code
        from workflow.lib.recording.engine_run import record

        compute_by_torch_code()
    return record


@contextmanager
def recording_process() -> Iterator[RecordingProcess]:
    """Yield the processes, which start at the first request, and end them with the block."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    workers = min(MOST_AT_ONCE, cores)
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as executor:
        # On two cores other stages run beside this one.
        yield RecordingProcess(executor, processes=workers if cores > MOST_AT_ONCE else 1)


class PlanRecorder:
    """Records plans of one model, each once: a `plan_search.Recorder`."""

    def __init__(
        self,
        process: RecordingProcess,
        config: Mapping[str, Any],
        shape: ModelShape,
        *,
        checked: bool = True,
    ) -> None:
        """config: the model's config.json; checked: after the start-up checks."""
        self._process, self._config, self._shape = process, config, shape
        self._checked = checked

    def tape(self, plan: StepPlan) -> Tape:
        """Return the allocator's events in a process of the plan; raises as `record` does."""
        recorded_plan = self.recorded_plan(plan)
        key = recording_key(self._config, recorded_plan, checked=self._checked)
        return kept_or_made(
            key, lambda: self._process.record(self._config, recorded_plan, checked=self._checked)
        )

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the peaks of a process of each plan."""
        return [
            peaks.on_cpu(CPU_PROCESS_BYTES) if plan.device == "cpu" else peaks
            for plan, peaks in zip(plans, self.recorded_peaks(plans), strict=True)
        ]

    def recorded_peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the same on a GPU: shipped, cached or recorded now."""
        recorded_plans = [self.recorded_plan(plan) for plan in plans]
        cached = [known_peaks(self._config, plan, checked=self._checked) for plan in recorded_plans]
        new = [plan for plan, entry in zip(recorded_plans, cached, strict=True) if entry is None]
        made = self._process.peaks(self._config, new, checked=self._checked)
        for plan, peaks in zip(new, made, strict=True):
            keep_peaks(self._config, plan, peaks, checked=self._checked)
        recorded = iter(made)
        return [next(recorded) if entry is None else entry for entry in cached]

    def recorded_plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan by which a recording is made and cached."""
        return as_recorded(replace(plan, offload_window_bytes=offload_window(self._shape, plan)))


@contextmanager
def plan_recorder(config: Mapping[str, Any], shape: ModelShape) -> Iterator[PlanRecorder]:
    """Yield the recorder of plans of a config.json's model, with processes of the block."""
    with recording_process() as process:
        yield PlanRecorder(process, config, shape)


def as_recorded(plan: StepPlan) -> StepPlan:
    """Return the plan without fields that no recording depends on, so that plans share one. The
    packages' FlashAttention allocates what torch's own does."""
    packaged = plan.attention_kind == "flash" and plan.attention != VARLEN
    return replace(
        plan,
        device="cuda",
        nodes=1,
        cuda_graphs=plan.graphed,
        attention=RECORDED_FLASH if packaged else plan.attention,
        compute_dtype="float32" if plan.compute_bytes == 4 else "bfloat16",
        accumulation_steps=min(plan.accumulation_steps, 2),
        dropout=0.05 if plan.dropout else 0.0,  # for any share
        gpu_memory_bytes=None,
        num_steps=0,
    )

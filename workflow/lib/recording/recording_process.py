"""A process for recordings: whoever asks for one needs no torch, or keeps its own as it is."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.offload_terms import offload_window
from workflow.lib.planning.preflight.replay_check import NotRecordedError
from workflow.lib.recording.kept_tapes import kept_or_made, recording_key
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import VARLEN
from workflow.lib.system.environment import importing
from workflow.lib.system.undocumented_interfaces import check_recordings


class RecordingProcess:
    """Records one plan after the other."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def record(
        self,
        config: Mapping[str, Any],
        plan: StepPlan,
        *,
        checked: bool = True,
        whole: bool = False,
    ) -> Tape:
        """Return the recording; arguments are those of `engine_run.record`.

        Raises `NotRecordedError` if the model uses what fake tensors cannot do, and `UserError` as
        building a model does.
        """
        return self._executor.submit(
            _recorded, config, as_recorded(plan), checked=checked, whole=whole
        ).result()


def _recorded(config: Mapping[str, Any], plan: StepPlan, *, checked: bool, whole: bool) -> Tape:
    """Record in the process; torch's own errors are told in words, as some cannot be sent."""
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
    # A recording collects garbage before each of its steps: it would take a third of its time to
    # look through what the packages have made.
    with importing():
        check_recordings()
        from workflow.lib.model.kernel_packages import compute_by_torch_code
        from workflow.lib.recording.engine_run import record

        compute_by_torch_code()
    return record


@contextmanager
def recording_process() -> Iterator[RecordingProcess]:
    """Yield the process, which starts when it is first asked; end it with the block."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield RecordingProcess(executor)


class PlanRecorder:
    """Records plans of one model, for preflight's verdict; each once, whoever asks."""

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

    def __call__(self, plan: StepPlan) -> Tape:
        """Return what a process of the plan asks of a GPU's allocator; raises as
        `RecordingProcess.record` does.
        """
        asked = as_recorded(replace(plan, offload_window_bytes=offload_window(self._shape, plan)))
        key = recording_key(self._config, asked, checked=self._checked)
        return kept_or_made(
            key, lambda: self._process.record(self._config, asked, checked=self._checked)
        )


def as_recorded(plan: StepPlan) -> StepPlan:
    """Return the plan without what no recording depends on, so that plans share one. All kernels
    without a matrix of scores ask for the same; torch's own need no further package.
    """
    return replace(
        plan,
        attention=VARLEN if plan.attention_kind == "flash" else plan.attention,
        compute_dtype="float32" if plan.compute_bytes == 4 else "bfloat16",
        accumulation_steps=min(plan.accumulation_steps, 2),
        dropout=0.05 if plan.dropout else 0.0,  # whatever the share is
        gpu_memory_bytes=None,
        num_steps=0,
    )

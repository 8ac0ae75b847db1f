"""The live view of a training: TensorBoard files, and on request Weights & Biases.

Both show the lines of `metrics.jsonl`. At a start TensorBoard's files are written anew, and Weights
& Biases is sent what it lacks, so no point is doubled or lost. On the main process alone."""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.system.errors import UserError, setting_error

Row = Mapping[str, Any]
View = Callable[[Row], None]

FLUSH_S = 10  # how old the newest point of a TensorBoard file may be
NOT_CURVES = frozenset({"step", "elapsed_s"})
# No crash reports to the vendor, no questions on the terminal.
WANDB_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def check_tracking(settings: TrackingConfig) -> None:
    """Raise `UserError` if a view is asked for whose package, or whose key, is missing."""
    if settings.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise setting_error(
            "tracking.tensorboard",
            True,
            "the package tensorboardX is not installed",
            "Install it (pip install -r envs/torch.txt), or set false",
        )
    if settings.wandb_project is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise setting_error(
            "tracking.wandb_project",
            settings.wandb_project,
            "the package wandb is not installed",
            "Install it (pip install -r envs/wandb.txt), or set null",
        )
    if os.environ.get("WANDB_MODE", "online") == "online" and not os.environ.get("WANDB_API_KEY"):
        raise setting_error(
            "tracking.wandb_project",
            settings.wandb_project,
            "there is no WANDB_API_KEY in the environment",
            "Export it, or WANDB_MODE=offline to send later (wandb sync), or set null",
        )


@contextmanager
def live_view(
    settings: TrackingConfig,
    *,
    folder: Path,
    run: str,
    identity: str,
    rows: Sequence[Row],
    config: Mapping[str, Any],
) -> Iterator[View]:
    """Show `rows`, those of the journal so far, and every row that the yielded function is given.
    folder: of `tensorboard/<run>/` and `wandb/`; identity: of the trajectory; config: settings
    shown. Raises `UserError` if Weights & Biases refuses."""
    with ExitStack() as stack:
        views: list[View] = []
        if settings.tensorboard:
            views.append(stack.enter_context(_tensorboard(folder / "tensorboard" / run, rows)))
        if settings.wandb_project is not None:
            wandb_view = _wandb(
                settings.wandb_project,
                folder=folder,
                run=run,
                identity=identity,
                rows=rows,
                config=config,
            )
            views.append(stack.enter_context(wandb_view))

        def show(row: Row) -> None:
            for view in views:
                view(row)

        yield show


def curves(row: Row) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if name not in NOT_CURVES}
    by_source = row.get("heldout_losses") or {}
    numbers |= {f"heldout_loss/{source}": loss for source, loss in by_source.items()}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


@contextmanager
def _tensorboard(folder: Path, rows: Sequence[Row]) -> Iterator[View]:
    """Write event files anew, with the times of an uninterrupted run."""
    from tensorboardX import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # purge_step: a TensorBoard that is open drops what it has read of the files before
    writer = SummaryWriter(logdir=str(folder), purge_step=0, flush_secs=FLUSH_S)
    began = time.time() - (float(rows[-1]["elapsed_s"]) if rows else 0.0)

    def show(row: Row) -> None:
        for name, value in curves(row).items():
            writer.add_scalar(
                f"training/{name}", value, row["step"], walltime=began + float(row["elapsed_s"])
            )

    try:
        for row in rows:
            show(row)
        writer.flush()
        yield show
    finally:
        writer.close()


@contextmanager
def _wandb(
    project: str,
    *,
    folder: Path,
    run: str,
    identity: str,
    rows: Sequence[Row],
    config: Mapping[str, Any],
) -> Iterator[View]:
    """Continue the run of this identity, or begin it; steps are never sent again."""
    os.environ.update(WANDB_ENVIRONMENT)  # before the import, which reads them
    wandb = importlib.import_module("wandb")
    folder.mkdir(parents=True, exist_ok=True)
    wandb_settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, x_disable_stats=True, silent=True
    )
    try:
        wandb_run = wandb.init(
            project=project,
            name=run,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb_settings,
        )
    except wandb.Error as error:
        raise UserError(
            f"tracking.wandb_project = {project!r}: Weights & Biases refuses the run ({error}). "
            "Check the key and the project, or set null."
        ) from None
    # the step that it would count next: 0 of a new run, one past the last of a resumed one
    next_step = wandb_run.step

    def show(row: Row) -> None:
        if row["step"] >= next_step:
            wandb_run.log(curves(row), step=row["step"])

    failed = True
    try:
        for row in rows:
            show(row)
        yield show
        failed = False
    finally:
        wandb_run.finish(exit_code=int(failed))

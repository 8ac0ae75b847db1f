"""The live view of a training, by the trackers in `TRACKERS`.

They show the lines of `metrics.jsonl`. At a start TensorBoard's files are written anew, and the
others get only missing lines, so no point is doubled or lost. On the main process alone."""

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.system.environment import shipped_path
from workflow.lib.system.errors import UserError, setting_error

Row = Mapping[str, Any]
View = Callable[[Row], None]

FLUSH_S = 10  # bound of the age of a TensorBoard file's newest point
NOT_CURVES = frozenset({"step", "elapsed_s"})


class Shown(NamedTuple):
    """A training for trackers."""

    folder: Path  # parent of the folders of trackers with files
    run: str
    identity: str  # of the trajectory
    rows: Sequence[Row]  # of the journal so far
    config: Mapping[str, Mapping[str, Any]]  # settings shown, by section


# The first step that a tracker lacks, and the function that sends it a row.
Opened = AbstractContextManager[tuple[int, View]]


@dataclass(frozen=True)
class Tracker:
    """A package that shows curves, switched on by a setting of `tracking`."""

    setting: str
    package: str
    installed_by: str
    opened: Callable[[str, Shown], Opened]
    """Continues the run of this identity, or begins it; takes the setting's value."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the package, set before its import unless the user has: no reports to its vendor."""
    refuses: Callable[[], tuple[str, str] | None] = lambda: None
    """A fault beside a missing package, and the cure."""

    def value(self, settings: TrackingConfig) -> Any:
        return getattr(settings, self.setting)

    def error(self, settings: TrackingConfig, finding: str, cure: str) -> UserError:
        value = self.value(settings)
        off = "false" if value is True else "null"
        return setting_error(f"tracking.{self.setting}", value, finding, f"{cure}, or set {off}")


def check_tracking(settings: TrackingConfig) -> None:
    """Raise `UserError` for a tracker whose package, or whose key, is missing."""
    for tracker in TRACKERS:
        if not tracker.value(settings):
            continue
        if importlib.util.find_spec(tracker.package) is None:
            finding = f"the package {tracker.package} is not installed"
            packages = shipped_path(tracker.installed_by)
            raise tracker.error(settings, finding, f"Install it (pip install -r {packages})")
        if (refused := tracker.refuses()) is not None:
            raise tracker.error(settings, *refused)


@contextmanager
def live_view(settings: TrackingConfig, shown: Shown) -> Iterator[View]:
    """Show the rows of the journal so far, and every row passed to the yielded function. Raises
    `UserError` if a tracker refuses."""
    with ExitStack() as stack:
        views: list[View] = []
        for tracker in TRACKERS:
            if not tracker.value(settings):
                continue
            for name, value in tracker.environment.items():
                os.environ.setdefault(name, value)
            try:
                opened = tracker.opened(tracker.value(settings), shown)
                next_step, show = stack.enter_context(opened)
            except Exception as error:
                finding = f"{tracker.package} refuses the run ({error})"
                raise tracker.error(settings, finding, "Check its server and key") from error
            views.append(_from(next_step, show))

        def show_all(row: Row) -> None:
            for view in views:
                view(row)

        for row in shown.rows:
            show_all(row)
        yield show_all


def _from(next_step: int, show: View) -> View:
    """Return a view without earlier steps."""
    return lambda row: show(row) if row["step"] >= next_step else None


def curves(row: Row) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if name not in NOT_CURVES}
    for source, loss in (row.get("heldout_losses") or {}).items():
        # the form of names that all trackers accept
        numbers[f"heldout_loss/{re.sub(r'[^A-Za-z0-9_.-]', '_', source)}"] = loss
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


@contextmanager
def _tensorboard(_: object, shown: Shown) -> Iterator[tuple[int, View]]:
    """Rewrite all event files, with the times of an uninterrupted run."""
    from tensorboardX import SummaryWriter

    folder, rows = shown.folder / "tensorboard" / shown.run, shown.rows
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # purge_step: an open TensorBoard drops the points of earlier files
    writer = SummaryWriter(logdir=str(folder), purge_step=0, flush_secs=FLUSH_S)
    began = time.time() - (float(rows[-1]["elapsed_s"]) if rows else 0.0)

    def show(row: Row) -> None:
        for name, value in curves(row).items():
            writer.add_scalar(
                f"training/{name}", value, row["step"], walltime=began + float(row["elapsed_s"])
            )

    try:
        yield 0, show
    finally:
        writer.close()


@contextmanager
def _wandb(project: str, shown: Shown) -> Iterator[tuple[int, View]]:
    import wandb

    shown.folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, x_disable_stats=True, silent=True
    )
    run = wandb.init(
        project=project,
        name=shown.run,
        id=shown.identity,
        resume="allow",
        dir=str(shown.folder),
        config=dict(shown.config),
        settings=settings,
    )
    failed = True
    try:
        yield run.step, lambda row: run.log(curves(row), step=row["step"])
        failed = False
    finally:
        run.finish(exit_code=int(failed))


def _wandb_lacks() -> tuple[str, str] | None:
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_API_KEY"):
        return None
    finding = "there is no WANDB_API_KEY in the environment"
    return finding, "Export it, or WANDB_MODE=offline to send later (wandb sync)"


@contextmanager
def _mlflow(experiment: str, shown: Shown) -> Iterator[tuple[int, View]]:
    import mlflow

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        folder = (shown.folder / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment(experiment)
    same = f"tags.identity = '{shown.identity}'"
    earlier_runs = [
        run.info.run_id for run in mlflow.search_runs(filter_string=same, output_format="list")
    ]
    tags = {"identity": shown.identity}
    with mlflow.start_run(
        run_id=earlier_runs[0] if earlier_runs else None, run_name=shown.run, tags=tags
    ) as run:
        sections = shown.config.items()
        if not earlier_runs:
            mlflow.log_params({f"{s}.{key}": x for s, keys in sections for key, x in keys.items()})
        points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")

        def show(row: Row) -> None:  # in the background: a server may be slow, or gone
            mlflow.log_metrics(curves(row), step=row["step"], synchronous=False)

        yield 1 + max((point.step for point in points), default=-1), show
        mlflow.flush_async_logging()


@contextmanager
def _trackio(project: str, shown: Shown) -> Iterator[tuple[int, View]]:
    os.environ.setdefault("TRACKIO_DIR", str((shown.folder / "trackio").resolve()))
    import trackio

    run = trackio.init(
        project=project,
        name=shown.identity,
        group=shown.run,
        config=dict(shown.config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    try:
        yield run._next_step, lambda row: run.log(curves(row), step=row["step"])
    finally:
        run.finish()


TRACKERS = (
    Tracker("tensorboard", "tensorboardX", "envs/torch.txt", _tensorboard),
    Tracker(
        "wandb_project",
        "wandb",
        "envs/wandb.txt",
        _wandb,
        environment={"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"},
        refuses=_wandb_lacks,
    ),
    Tracker(
        "mlflow_experiment",
        "mlflow",
        "envs/mlflow.txt",
        _mlflow,
        environment={"MLFLOW_DISABLE_TELEMETRY": "true"},
    ),
    Tracker("trackio_project", "trackio", "envs/trackio.txt", _trackio),
)

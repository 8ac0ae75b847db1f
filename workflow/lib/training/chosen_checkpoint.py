"""A checkpoint that the user names: to export its adapter, or to go back to it.

To go back, all later files are set aside in one folder beside it, and none is removed: then the
ordinary start finds this checkpoint as the newest."""

import logging
from pathlib import Path

from workflow.lib.artifacts.checkpoint_folder import saved_steps, set_aside, step_dir
from workflow.lib.distributed.sharded_files import DamagedError, check_files, read_index
from workflow.lib.system.errors import setting_error

logger = logging.getLogger("workflow")

GO_BACK = (
    "Name one of these steps, or go back to one before it and train from there "
    "(python -m workflow.scripts.rewind RUN STEP)"
)


def chosen_checkpoint(folder: Path, step: int, *, setting: str, change: str) -> Path:
    """Return the folder of the checkpoint after `step` steps. Raises `UserError` if there is none,
    with the steps that have one."""
    steps = saved_steps(folder)
    if not steps:
        raise setting_error(setting, step, f"{folder} has no checkpoints", "Train the run first")
    if step not in steps:
        available = f"only those of steps {', '.join(map(str, steps))}"
        raise setting_error(setting, step, f"{folder} has no checkpoint of it, {available}", change)
    return step_dir(folder, step)


def last_trained(checkpoints: Path, run: str) -> Path:
    """Return the folder in `checkpoints` where a run was trained last, among those of its settings
    and data. Raises `UserError` if there is none."""
    trained = [folder for folder in checkpoints.glob("*-*-*") if saved_steps(folder)]
    names = {folder: folder.name.rsplit("-", 2)[0] for folder in trained}
    folders = [folder for folder in trained if names[folder] == run]
    if not folders:
        bound = f"{checkpoints} has those of {', '.join(sorted({*names.values()})) or 'no run'}"
        raise setting_error("rewind", run, bound, "Name a run that was trained")
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def go_back(folder: Path, step: int, *, results: Path) -> None:
    """Set aside a run's files after the checkpoint of `step`: later checkpoints and best adapters,
    and the `results` of its end. Raises `UserError` if that checkpoint is damaged, or if nothing is
    later. No other process may write to `folder` meanwhile."""
    chosen = chosen_checkpoint(folder, step, setting="rewind", change="Name one of these steps")
    newest = saved_steps(folder)[-1]
    if step == newest:
        bound = "it is the newest checkpoint, from which the plain command goes on"
        raise setting_error("rewind", step, bound, "Name an earlier one")
    try:
        check_files(chosen, read_index(chosen))
    except DamagedError as error:
        bound = f"this checkpoint is damaged ({error})"
        raise setting_error("rewind", step, bound, "Name another step") from None
    aside = set_aside(folder, after=step, results=results)
    logger.info(
        "the next start goes on after step %d; what came later, up to step %d, is in %s: delete "
        "that folder when nobody needs it",
        *(step, newest, aside),
    )

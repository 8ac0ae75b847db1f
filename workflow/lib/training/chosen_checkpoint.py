"""A checkpoint that the user names: its adapter is exported, or the run goes on from it.

To go back, all that came after it is set aside, not removed, in a folder beside it."""

from pathlib import Path

from workflow.lib.system.errors import setting_error
from workflow.lib.training.checkpoint import saved_steps, step_dir

GO_BACK = (
    "Name one of these steps, or go back to one before it and train from there "
    "(snakemake rewind --config rewind=RUN@STEP)"
)


def chosen_checkpoint(folder: Path, step: int, *, setting: str, change: str) -> Path:
    """Return the folder of the checkpoint after `step` steps. Raises `UserError` if there is none,
    with the steps that have one."""
    steps = saved_steps(folder)
    if step not in steps:
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "none is"
        raise setting_error(setting, step, f"{folder} has no checkpoint of it, {there}", change)
    return step_dir(folder, step)

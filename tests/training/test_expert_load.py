"""Where a mixture's tokens went is the same of a run that was interrupted."""

import shutil

from tests.support.distributed import run_distributed
from tests.support.finished import STEPS, arguments, finetune, finished_mixture
from workflow.lib.system.files import read_checked_json
from workflow.lib.training.checkpoint import saved_steps, step_dir


def test_resumed_run_counts_the_rows_before_its_interruption(shared_folder, tmp_path):
    whole = finished_mixture(shared_folder, "qwen3_moe")
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "finetune")
    args = arguments(run)
    shutil.rmtree(step_dir(args.checkpoints, STEPS))
    (before,) = saved_steps(args.checkpoints)[-1:]
    run_distributed(finetune, args, world_size=2)
    summaries = [read_checked_json(folder / "finetune" / "summary.json") for folder in (whole, run)]
    assert summaries[1]["resumed_from_steps"] == [before]
    assert summaries[0]["expert_load"] == summaries[1]["expert_load"]

"""Measure the exported adapter, its NF4 base and, if there is one, the merged model: held-out loss,
tasks, sample answers.

Reads exported files only, through stock Transformers and PEFT. What was measured before on the same
model under the same settings (a folder of results, `--archive`) is not measured again. A process a
GPU takes a share of the work, with the model on each, or sharded over all of them where it is
larger than one. Writes `base.json`, `tuned.json` and, with `--merged`, `merged.json`. Works without
a network unless `evaluate.tasks` names a task that is not in `evaluate.tasks_dir`.
"""

import argparse
import os
import sys
from pathlib import Path

from workflow.lib.evaluation.task_files import environment
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.system.environment import is_worker
from workflow.lib.system.hardware import visible_gpus
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = EvaluateConfig.model_validate(args.config["evaluate"])
    if args.batch_size is not None:
        settings = settings.model_copy(update={"batch_size": args.batch_size})
    # Hugging Face libraries read these variables when they are imported, so they are imported
    # after.
    os.environ.update(environment(settings.tasks, settings.tasks_dir))
    from workflow.lib.distributed.work_sharing import divide
    from workflow.lib.evaluation.batch_size import restarting
    from workflow.lib.model.backends import choose_device
    from workflow.lib.training.launch import Workers, launch_workers

    gpus = visible_gpus() if choose_device().type == "cuda" else []
    division = divide(
        settings.processes,
        shard=settings.shard,
        folders=[folder for folder in (args.base, args.merged) if folder],
        gpu_bytes=[gpu.total_bytes for gpu in gpus],
    )
    if division.processes == 1 or is_worker():
        from workflow.scripts.evaluate_run_worker import work

        work(args, settings, sharded=division.sharded)
        return

    def launch(most: int | None) -> None:
        workers = Workers(
            "workflow.scripts.evaluate_run",
            [*sys.argv[1:], *([] if most is None else ["--batch-size", str(most)])],
            processes=division.processes,
            what="evaluation",
        )
        launch_workers(workers)

    restarting(launch)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--base", type=Path, required=True, help="folder of the NF4 base")
    parser.add_argument(
        "--adapter", type=Path, required=True, help="folder of the exported adapter"
    )
    parser.add_argument("--merged", type=Path, help="folder of the merged model; default: none")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the tokens")
    parser.add_argument("--archive", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--output-base", type=Path, required=True, help="base.json to write")
    parser.add_argument("--output-tuned", type=Path, required=True, help="tuned.json to write")
    parser.add_argument("--output-merged", type=Path, help="merged.json to write")
    parser.add_argument(
        "--batch-size", type=int, help="instead of evaluate.batch_size; of a new start"
    )
    parser.add_argument("--chat-template", help="Jinja file; default: the tokenizer's own template")
    run(main, parser)

"""Measure the served model, the original model, the NF4 base and other forms: held-out loss, loss
of other texts, tasks, sample answers.

Reads model files only, through stock Transformers and PEFT. Earlier measurements of the same model
with the same settings (a folder of results, `--archive`) are not repeated. Each GPU's process takes
a share of the work, with a copy of the model, or a shard of it if it is larger than one GPU. An
original that fits nowhere is read layer by layer, for its losses alone. Writes `<subject>.json` of
each of `evaluate.subjects` into the folder `--output`. Works without a network unless
`evaluate.tasks` names a task that is not in `evaluate.tasks_dir`."""

import argparse
import os
import sys

from workflow.lib.evaluation.task_files import environment
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.settings.forms import EXPORTS, FORMS
from workflow.lib.system.environment import importing, is_worker
from workflow.lib.system.hardware import available_host_bytes, visible_gpus
from workflow.scripts.command import form_folders, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = EvaluateConfig.model_validate(args.config["evaluate"])
    if args.batch_size is not None:
        settings = settings.model_copy(update={"batch_size": args.batch_size})
    # Hugging Face libraries read these variables when they are imported, so they are imported
    # after.
    os.environ.update(environment(settings))
    with importing():
        from workflow.lib.distributed.work_sharing import divide, fits
        from workflow.lib.evaluation.batch_size import restarting
        from workflow.lib.model.backends import choose_device
        from workflow.lib.training.launch import Workers, launch_workers

    subjects = args.config["evaluate"]["subjects"]
    gpus = visible_gpus() if choose_device().type == "cuda" else []
    gpu_bytes = [gpu.total_bytes for gpu in gpus]
    folders = form_folders(args)
    # An original that fits nowhere is streamed, unless the adapter is measured on it.
    loaded = {FORMS[name].weights for name in subjects if name != "original"}
    division = divide(
        settings.processes,
        shard=settings.shard,
        folders=[folders[name] for name in loaded],
        gpu_bytes=gpu_bytes,
    )
    if args.model and "model" not in loaded and not is_worker():
        args.stream_original = not fits(
            args.model, division, gpu_bytes=gpu_bytes, host_bytes=available_host_bytes()
        )
    if division.processes == 1 or is_worker():
        with importing():
            from workflow.scripts.evaluate_run_worker import work

        work(args, settings, sharded=division.sharded)
        return

    def launch(most: int | None) -> None:
        more = ["--stream-original"] if args.stream_original else []
        more += [] if most is None else ["--batch-size", str(most)]
        workers = Workers(
            "workflow.scripts.evaluate_run",
            [*sys.argv[1:], *more],
            processes=division.processes,
            what="evaluation",
        )
        launch_workers(workers)

    restarting(launch)


if __name__ == "__main__":
    optional = " ".join(["model start scores chat_template", *EXPORTS])
    parser = stage_parser(__doc__, needs="run base adapter tokens archive output", takes=optional)
    parser.add_argument(
        "--stream-original", action="store_true", help="read it layer by layer; of a new start"
    )
    parser.add_argument(
        "--batch-size", type=int, help="instead of evaluate.batch_size; of a new start"
    )
    run(main, parser)

"""Measure the exported adapter, its NF4 base and, if there is one, the merged model: held-out loss,
tasks, sample answers.

Reads exported files only, through stock Transformers and PEFT. What was measured before on the same
model under the same settings (a folder of results, `--archive`) is not measured again. A process a
GPU takes a share of the work, with the model on each, or sharded over all of them where it is
larger than one. Writes `base.json`, `tuned.json` and, with `--merged`, `merged.json`. Works without
a network unless `evaluate.tasks` names a task that is not in `evaluate.tasks_dir`.
"""

import argparse
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from workflow.lib.evaluation.task_files import environment
from workflow.lib.settings.config import EvaluateConfig, ModelConfig
from workflow.lib.system.environment import is_worker
from workflow.lib.system.files import provenance, write_json
from workflow.lib.system.hardware import visible_gpus
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")
TIMEOUT_S = 24 * 3600.0  # a process may wait this long for the share of another, if that moves
PREPARING_S = 3600.0  # of tasks, whose data may be downloaded


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
    from workflow.lib.training.launch import launch_workers

    gpus = visible_gpus() if choose_device().type == "cuda" else []
    division = divide(
        settings.processes,
        shard=settings.shard,
        folders=[folder for folder in (args.base, args.merged) if folder],
        gpu_bytes=[gpu.total_bytes for gpu in gpus],
    )
    if division.processes == 1 or is_worker():
        work(args, settings, sharded=division.sharded)
        return

    def launch(most: int | None) -> None:
        launch_workers(
            "workflow.scripts.evaluate_run",
            [*sys.argv[1:], *([] if most is None else ["--batch-size", str(most)])],
            processes=division.processes,
            what="evaluation",
        )

    restarting(launch)


def work(args: argparse.Namespace, settings: EvaluateConfig, *, sharded: bool) -> None:
    """Be one process of the evaluation."""
    from workflow.lib.artifacts.records import SUBJECT_LABELS
    from workflow.lib.data.encoding.tokenizer import load_tokenizer, read_chat_template
    from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
    from workflow.lib.distributed.heartbeat import JOIN_S, Pulse
    from workflow.lib.distributed.work_sharing import check_recorded, main_first
    from workflow.lib.distributed.world import process_group
    from workflow.lib.evaluation import evaluated_models, results
    from workflow.lib.evaluation.measurement_cache import Archive
    from workflow.lib.evaluation.questions import measure, parts, prepare
    from workflow.lib.model.backends import choose_device
    from workflow.lib.system.checksums import listed_files

    with ExitStack() as stack:
        pulse = stack.enter_context(
            Pulse(rank=int(os.environ.get("RANK", 0)), start_s=JOIN_S, step_s=JOIN_S)
        )
        device, world = choose_device(), None
        if is_worker():
            world = stack.enter_context(process_group(device.type, timeout_s=TIMEOUT_S))
            device = world.device
            if not world.is_main:
                logger.setLevel(logging.CRITICAL)  # what the settings break is told once
        folders = [folder for folder in (args.base, args.adapter, args.merged) if folder]
        store = TokenStore.open(args.tokens)
        pulse.phase("checking the files")
        recorded = [file for folder in folders for file in listed_files(folder)]
        recorded += recorded_arrays(args.tokens, store.manifest)
        check_recorded(recorded, world=world, moved=pulse.moved)
        options = evaluated_models.load_options(
            args.base, device=device, settings=ModelConfig.model_validate(args.config["model"])
        )
        pulse.phase("preparing the questions", least_s=PREPARING_S)
        with main_first(world):
            tokenizer = load_tokenizer(args.base)
            if args.chat_template is not None:
                tokenizer.chat_template = read_chat_template(tokenizer, args.chat_template)
            questions = prepare(store, tokenizer=tokenizer, settings=settings)
            models = evaluated_models.subjects(
                base=args.base, adapter=args.adapter, merged=args.merged, options=options,
                shards=world if sharded else None,
            )  # fmt: skip
        logger.setLevel(logging.DEBUG if world is None or world.is_main else logging.ERROR)
        machine = evaluated_models.machine_facts(options)
        logger.info(
            "%s, %s, %s, %d process(es)%s: loss of %d of %d held-out documents, %d samples, tasks: "
            "%s",
            machine["device"],
            machine["compute_dtype"],
            machine["attention"],
            world.size if world else 1,
            " that share the weights" if sharded else "",
            len(questions.losses_of),
            store.num_heldout_documents,
            len(questions.prompts),
            ", ".join(questions.tasks) or "none",
        )
        asked = parts(questions, world=world)
        archive = Archive(args.archive)
        measured = {}
        for model in models:
            measured[model.name], new = measure(
                evaluated_models.watched(model, pulse=pulse, folders=folders),
                asked,
                archive=archive,
                machine=machine,
                world=world,
            )
            logger.info(
                "%s: measured %s, %d of %d parts known before",
                SUBJECT_LABELS[model.name],
                ", ".join(new) or "nothing",
                len(asked) - len(new),
                len(asked),
            )
        if world is None or world.is_main:
            write(args, results.artifacts(measured, questions, run=args.run))


def write(args: argparse.Namespace, artifacts: dict[str, dict[str, object]]) -> None:
    """Write one file a subject, and tell what came out."""
    from workflow.lib.evaluation.results import summary_lines

    for subject, content in artifacts.items():
        path: Path = getattr(args, f"output_{subject}")
        write_json(path, content | {"provenance": provenance()})
    for line in summary_lines(artifacts):
        logger.info("%s", line)


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

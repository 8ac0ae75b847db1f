"""Talk to the model of a finished run.

    python -m workflow.scripts.chat RUN
    python -m workflow.scripts.chat RUN --prompt "What does str.lower do?"

The adapter answers on its NF4 base, as it was trained; `--model` asks another form of the model
instead. `/new` begins a new conversation, Ctrl-C ends an answer, Ctrl-D the
program."""

import argparse
import json
import readline
from pathlib import Path

from workflow.lib.artifacts.layout import RESULTS, model_dir
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.settings.config import ModelConfig, RunConfig
from workflow.lib.settings.forms import FORMS, SUBJECTS
from workflow.lib.system.environment import importing
from workflow.lib.system.errors import UserError, setting_error
from workflow.scripts.command import command_parser, logger, run

MODELS = tuple(name for name in SUBJECTS if FORMS[name].adapter != "start")
NEW = "/new"


def main(args: argparse.Namespace) -> None:
    folder, exported = model_folders(args)
    adapter = exported if FORMS[args.model].adapter else None
    with importing():
        from transformers import TextStreamer

        from workflow.lib.checkpoints.adapter import Adapter
        from workflow.lib.checkpoints.checkpoint import Checkpoint
        from workflow.lib.evaluation.conversation import open_conversation

    logger.info("loading %s%s", folder, f" with {adapter}" if adapter else "")
    conversation = open_conversation(
        Checkpoint(folder),
        exported,
        adapter=Adapter(adapter) if adapter else None,
        settings=trained_model(args),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
    )
    conversation.system = args.system
    conversation.template_kwargs = args.template_kwargs
    streamer = TextStreamer(conversation.tokenizer, skip_prompt=True, skip_special_tokens=True)
    if args.prompt is not None:
        conversation.answer(args.prompt, streamer=streamer)
        return
    readline.set_auto_history(True)
    while (text := typed_text()) is not None:
        if text.strip() == NEW:
            conversation.turns = []
            continue
        try:
            conversation.answer(text, streamer=streamer)
        except KeyboardInterrupt:
            print("\n(ended; the model will not remember this turn)")
        except UserError as error:
            print(error)


def typed_text() -> str | None:
    """Return what the user types, not empty; None at the end."""
    while True:
        try:
            text = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if text.strip():
            return text


def summary_of(args: argparse.Namespace) -> Summary:
    path = args.results / "runs" / args.run / "finetune" / "summary.json"
    if not path.is_file():
        runs = sorted(p.parents[1].name for p in args.results.glob("runs/*/finetune/summary.json"))
        raise setting_error(
            "RUN",
            args.run,
            f"{path} is not there: the trained runs are {', '.join(runs) or '(none)'}",
            "Name one of them or another folder (--results), or train it: snakemake --cores all",
        )
    return read_record(path, Summary)


def trained_model(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig.model_validate(summary_of(args).settings.model.model_dump())


def model_folders(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the model to load and of the run's adapter."""
    run_folder, form = args.results / "runs" / args.run, FORMS[args.model]
    adapter, summary = run_folder / "consolidate" / "adapter", summary_of(args)
    if form.export is not None:
        folder = run_folder / form.export.folder
        change = f"Set export.{args.model} and repeat the workflow, or name another --model"
    elif form.weights == "model":
        # as in the run, whose paths are relative to the folder above its results
        folder = args.results.parent / model_dir(RunConfig(model=trained_model(args)))
        change = "Name another --model"
    else:
        folder = args.results.parent / summary.base
        change = "Run the workflow again: snakemake --cores all"
    for path in (folder, adapter):
        if not path.is_dir():
            raise setting_error("--model", args.model, f"{path} is not there", change)
    return folder, adapter


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("--prompt", help="one question, in place of a conversation")
    parser.add_argument("--model", choices=MODELS, default="tuned", help="(%(default)s)")
    parser.add_argument("--system", help="system text")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument(
        "--template-kwargs", type=json.loads, default={}, help="JSON: switches of the chat template"
    )
    parser.add_argument("--results", type=Path, default=Path(RESULTS), help="(%(default)s)")
    run(main, parser)

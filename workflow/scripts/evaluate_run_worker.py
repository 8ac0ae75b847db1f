"""One process of the evaluation: it checks the files, prepares the questions, and puts them to each
model.

`evaluate_run` starts it, alone or as several processes that share the work. The packages imported
here read environment variables at import, so `evaluate_run` sets those before."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.evaluation_record import ITEMS, Evaluation, Items, forgetting
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer, num_usable_tokens, read_chat_template
from workflow.lib.data.encoding.chat_template import with_arguments
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.work_sharing import Process, check_recorded, join, main_first
from workflow.lib.evaluation import evaluated_models
from workflow.lib.evaluation.other_texts import OtherTexts
from workflow.lib.evaluation.questions import (
    Archive,
    Measurement,
    Questions,
    Subject,
    measure,
    parts,
    parts_of,
    prepare,
)
from workflow.lib.evaluation.results import (
    evaluations,
    four_bits_of,
    items_of,
    method_of,
    summary_lines,
)
from workflow.lib.evaluation.rewards import Preferences
from workflow.lib.evaluation.token_objective import TokenObjective
from workflow.lib.export.stock_models import load_options
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.objectives.pairs import Pairs, RatedAnswers
from workflow.lib.scores.store import ScoreStore, recorded_scores
from workflow.lib.settings.config import (
    DistillConfig,
    EvaluateConfig,
    GrpoConfig,
    ModelConfig,
    PreferencesConfig,
    TrainConfig,
)
from workflow.lib.settings.forms import FORMS, SubjectName
from workflow.lib.settings.objectives import reads_start
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.files import new_folder, write_checked_json
from workflow.lib.system.input_files import Inputs
from workflow.scripts.command import form_folders, logger

PREPARING_S = 3600.0  # of tasks, whose data may be downloaded


def work(args: argparse.Namespace, settings: EvaluateConfig, *, sharded: bool) -> None:
    """Run one process of the evaluation."""
    with ExitStack() as stack:
        process = join(stack, sharded=sharded)
        store = TokenStore.open(args.tokens)
        folders = form_folders(args)
        inputs = inputs_of(args, settings, folders)
        sources = check_inputs(args, folders, store, process)
        options = load_options(
            Checkpoint(args.base),
            device=process.device,
            settings=ModelConfig.model_validate(args.config["model"]),
        )
        process.pulse.phase("preparing the questions", least_s=PREPARING_S)
        with main_first(process.world):
            questions = prepare_questions(args, settings, store)
            models = evaluated_models.subjects(
                args.config["evaluate"]["subjects"],
                folders,
                options=options,
                sources=sources,
                shards=process.shards,
                streamed=args.stream_original,
            )
        logger.setLevel(logging.DEBUG if process.is_main else logging.ERROR)
        machine = evaluated_models.machine_facts(options)
        log_questions(questions, store, machine, process)
        archive = Archive(args.archive, inputs)
        measured = measure_all(args, models, questions, machine, process, archive)
        if process.is_main:
            served = args.config["evaluate"]["served"]
            results = evaluations(
                measured,
                questions,
                run=args.run,
                served=served,
                four_bits=four_bits_of(args.base),
                quantized_by=method_of(args.base),
            )
            items = items_of(measured, questions, run=args.run, served=served, rows=store.input_ids)
            write(args.output, results, items)


def inputs_of(
    args: argparse.Namespace, settings: EvaluateConfig, folders: Mapping[str, Path]
) -> Inputs:
    """Return the files of the models, of the tasks and of the template."""
    tasks = Path(settings.tasks_dir).rglob("*") if settings.tasks_dir else ()
    template = [Path(args.chat_template)] if args.chat_template else []
    return Inputs([*folders.values(), *(path for path in tasks if path.is_file()), *template])


def check_inputs(
    args: argparse.Namespace,
    folders: Mapping[str, Path],
    store: TokenStore,
    process: Process,
) -> list[RecordedFile]:
    """Compare models, tokens and scores with their recorded checksums; return the files of the
    original, if it is measured. Collective."""
    process.pulse.phase("checking the files")
    recorded = [
        file
        for name, folder in folders.items()
        if name != "model"
        for file in evaluated_models.files_of(folder)
    ]
    recorded += recorded_arrays(args.tokens, store.manifest)
    recorded += recorded_scores(args.scores) if args.scores else []
    check_recorded(recorded, world=process.world)
    if "model" not in folders:
        return []
    return evaluated_models.source_files(folders["model"], world=process.world)


def objective_questions(
    args: argparse.Namespace, settings: EvaluateConfig, store: TokenStore
) -> dict[str, Any]:
    """Return the arguments of `prepare` for the loss of the run's objective."""
    name = TrainConfig.model_validate(args.config["train"]).objective
    preferences = PreferencesConfig.model_validate(args.config["preferences"])
    distill = DistillConfig.model_validate(args.config["distill"])
    grpo = GrpoConfig.model_validate(args.config["grpo"])
    objective = objective_of(name, preferences, distill, grpo)
    top_k = distill.top_k if name == "distill" else 0
    scores = ScoreStore.open(args.scores, tokens=store, top_k=top_k) if args.scores else None
    if not isinstance(objective, Pairs | RatedAnswers):
        scored = store.with_scores(scores)
        return {"objective": TokenObjective.of(scored, objective) if settings.heldout else None}
    reference: SubjectName | None = None
    if reads_start(name, preferences):
        reference = "base" if args.start is None else "start"
    return {
        "preferences": Preferences.of(
            store, objective, scores, settings=settings, measured_reference=reference
        )
    }


def prepare_questions(
    args: argparse.Namespace, settings: EvaluateConfig, store: TokenStore
) -> Questions:
    """Return the questions to all models, written by the chat template of the training."""
    tokenizer = load_tokenizer(args.base)
    texts = None
    if settings.forgetting:  # chats by the model's own template
        usable = num_usable_tokens(tokenizer, args.base)
        texts = OtherTexts.of(tokenizer, seq_len=store.seq_len, usable_tokens=usable)
    arguments = store.manifest["template_kwargs"]
    if args.chat_template is not None or arguments:
        template = read_chat_template(tokenizer, args.chat_template)
        tokenizer.chat_template = with_arguments(template, arguments)
    objective = objective_questions(args, settings, store)
    return prepare(store, tokenizer=tokenizer, settings=settings, other_texts=texts, **objective)


def log_questions(
    questions: Questions, store: TokenStore, machine: dict[str, Any], process: Process
) -> None:
    logger.info(
        "%s, %s, %s, %d process(es)%s: loss of %d of %d held-out documents and of %d other "
        "texts, %d samples, tasks: %s",
        machine["device"],
        machine["compute_dtype"],
        machine["attention"],
        process.world.size if process.world else 1,
        " that share the weights" if process.sharded else "",
        len(questions.losses_of),
        store.num_heldout_documents,
        len(questions.other_texts.documents) if questions.other_texts else 0,
        len(questions.prompts),
        ", ".join(questions.tasks) or "none",
    )


def measure_all(
    args: argparse.Namespace,
    models: Sequence[Subject],
    questions: Questions,
    machine: dict[str, Any],
    process: Process,
    archive: Archive,
) -> dict[SubjectName, Measurement]:
    """Return each model's answers, by its name. Collective."""
    question_parts = parts(questions, world=process.world)
    folders = list(form_folders(args).values())
    measured: dict[SubjectName, Measurement] = {}
    for model in models:
        measured[model.name], new = measure(
            evaluated_models.watched(model, pulse=process.pulse, folders=folders),
            question_parts,
            archive=archive,
            machine=machine,
            world=process.world,
        )
        logger.info(
            "%s%s: measured %s, %d of %d parts known before",
            FORMS[model.name].label,
            ", larger than memory and read layer by layer, its losses alone"
            if model.streamed
            else "",
            ", ".join(new) or "nothing",
            len(parts_of(model, question_parts)) - len(new),
            len(parts_of(model, question_parts)),
        )
    return measured


def write(folder: Path, results: dict[SubjectName, Evaluation], items: Items) -> None:
    """Write one file a subject and the items, all or none, and log the results."""
    with new_folder(folder) as made:
        for subject, evaluation in results.items():
            write_checked_json(made / f"{subject}.json", evaluation.as_json())
        write_checked_json(made / ITEMS, items.as_json())
    for line in summary_lines(results):
        logger.info("%s", line)
    if (forgot := forgetting(results)) is not None:
        logger.log(logging.WARNING if forgot.is_worse else logging.INFO, "%s", forgot)

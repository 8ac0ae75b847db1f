"""The questions to every subject, part by part: held-out loss, loss of other texts,
sample answers, and each task.

`prepare` makes the questions before any weight is loaded; `parts` are the questions as independent
measurements; `measure` asks one subject those that the archive lacks, and returns the answers to
all. `results` makes the JSON artifacts.

A part of one subject lies in `<archive>/<subject>/<part>-<key>.json`; both names are short hashes:
of the subject's checksums, and of settings, data and package versions. Runs may share the folder;
it may be deleted."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.data.tokens.token_store import Document, TokenStore, choose_documents
from workflow.lib.distributed.work_sharing import agreed, shared_out
from workflow.lib.distributed.world import World
from workflow.lib.evaluation.heldout_loss import heldout_sums
from workflow.lib.evaluation.lm_eval_tasks import LoadedTasks, load_tasks, run_tasks, task_facts
from workflow.lib.evaluation.other_texts import OtherTexts
from workflow.lib.evaluation.rewards import Preferences
from workflow.lib.evaluation.sample_answers import (
    AnswerSettings,
    Prompt,
    choose_prompts,
    generate_answers,
    stop_token_ids,
)
from workflow.lib.evaluation.task_scores import NO_SCORES, Loss, TaskScores
from workflow.lib.evaluation.token_objective import TokenObjective
from workflow.lib.scores.scoring import HeldoutSums
from workflow.lib.scores.streamed_model import StreamedModel
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.settings.forms import FORMS, SUBJECTS, SubjectName
from workflow.lib.system.checksums import RecordedFile, fault_text
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import provenance, read_checked_json, short_hash, write_checked_json
from workflow.lib.system.input_files import Inputs

logger = logging.getLogger("workflow")

FORMAT_VERSION = 2  # raised whenever the measurement or file of a part changes
# In checksums, but without influence on any number: they describe a folder's origin.
UNMEASURED = ("README.md", "quantization.json")


def content_key(*models: Sequence[RecordedFile]) -> str:
    """Return a short hash of the content of models, from the recorded SHA-256 of their files, which
    must have been checked (`work_sharing.check_recorded`)."""
    return short_hash(
        [[f"{f.sha256}  {f.name}" for f in files if f.name not in UNMEASURED] for files in models]
    )


@dataclass(frozen=True)
class Archive:
    """Finished measurements. inputs: files of the user that they depend on."""

    folder: Path
    inputs: Inputs = field(default_factory=partial(Inputs, ()))

    def find(self, subject: str, part: str, facts: Mapping[str, Any]) -> Any | None:
        """Return the measurement of `subject` under `facts`; None without a sound one."""
        path = self._path(subject, part, facts)
        if not path.is_file():
            return None
        try:
            return read_checked_json(path)["value"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning(
                "%s is damaged (%s): it is ignored, and measured again", path, fault_text(error)
            )
            return None

    def keep(self, subject: str, part: str, facts: Mapping[str, Any], value: Any) -> None:
        """Write a measurement. Raises `UserError` if an input changed meanwhile."""
        self.inputs.check()
        entry = {"part": part, "value": value, "provenance": provenance()}
        write_checked_json(self._path(subject, part, facts), entry)

    def _path(self, subject: str, part: str, facts: Mapping[str, Any]) -> Path:
        readable = re.sub(r"[^\w.-]", "_", part)
        key = short_hash([FORMAT_VERSION, part, facts])
        return self.folder / subject / f"{readable}-{key}.json"


HELDOUT = "heldout"
OTHERS = "other_answers"
OTHER_TEXTS = "other_texts"
LOSSES = (HELDOUT, OTHERS, OTHER_TEXTS)
STREAMED = (HELDOUT, OTHER_TEXTS)  # parts of a model that is read layer by layer
Model = PeftModel | PreTrainedModel


@dataclass(frozen=True)
class Subject:
    """A model to measure: its name, its content's key, and its opener. streamed: it is a
    `StreamedModel`, of which only losses of texts are measured."""

    name: SubjectName
    key: str
    opened: Callable[[], AbstractContextManager[Model | StreamedModel]]
    streamed: bool = False


@dataclass(frozen=True)
class Questions:
    """The questions to all subjects. losses_of: documents whose loss is measured, by number; may be
    none. sources: of each of these. preferences: of runs that train them, if their held-out loss is
    measured; objective: of other runs whose loss is not the mean -log p; other_texts: None if
    `evaluate.forgetting` is off."""

    settings: EvaluateConfig
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Document]
    losses_of: list[int]
    sources: list[str]
    prompts: list[Prompt]
    tasks: dict[str, LoadedTasks]
    preferences: Preferences | None = None
    objective: TokenObjective | None = None
    other_texts: OtherTexts | None = None


@dataclass(frozen=True)
class Part:
    """A measurement: name, all that decides it besides the subject, and its function (JSON)."""

    name: str
    facts: dict[str, Any]
    compute: Callable[[Any], Any]
    subjects: tuple[SubjectName, ...] = SUBJECTS


@dataclass(frozen=True)
class Measurement:
    """The answers of one subject: (summed -log p, tokens) by document of `losses_of`, tasks, texts
    by prompt. others: the same of `preferences.others`; objective: the summed loss by
    `Questions.objective` of each document; other_texts: as `losses`."""

    losses: list[Loss]
    tasks: TaskScores
    answers: list[str]
    others: list[Loss]
    objective: list[float]
    other_texts: list[Loss]


def prepare(
    store: TokenStore,
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluateConfig,
    preferences: Preferences | None = None,
    objective: TokenObjective | None = None,
    other_texts: OtherTexts | None = None,
) -> Questions:
    """Choose documents and prompts and load the tasks. Raises `UserError` as `load_tasks`, or for a
    held-out loss with fewer than two documents, which have no interval."""
    documents = store.heldout_documents()
    chosen = (
        choose_documents(documents, at_most=settings.max_documents, seed=settings.seed)
        if preferences is None
        else preferences.losses_of
    )
    if settings.heldout and len(chosen) < 2:
        what = "documents" if preferences is None else preferences.what
        raise setting_error(
            "evaluate.heldout",
            True,
            f"an interval needs at least 2 held-out {what} with trained tokens, and there are "
            f"{len(chosen)}",
            "Raise evaluate.max_documents, hold out more rows (data.heldout or "
            "data.heldout_share), or set it to false",
        )
    losses_of = chosen if settings.heldout else []
    sources = store.heldout_sources()
    return Questions(
        settings=settings,
        tokenizer=tokenizer,
        documents=documents,
        losses_of=losses_of,
        sources=[sources[number] for number in losses_of],
        prompts=choose_prompts(documents, chosen, count=settings.samples, seed=settings.seed),
        tasks=load_tasks(
            settings,
            tokenizer=tokenizer,
            trained_template_sha256=store.manifest["chat_template_sha256"],
        ),
        preferences=preferences if settings.heldout else None,
        objective=objective,
        other_texts=other_texts,
    )


def parts(questions: Questions, *, world: World | None = None) -> list[Part]:
    """Return the requested measurements; world: the processes that share each."""
    measurements = []
    losses = partial(_losses, questions=questions, objective=questions.objective, world=world)
    if questions.losses_of:
        measurements.append(losses(HELDOUT, questions.documents, questions.losses_of))
    if (preferences := questions.preferences) is not None:
        others = losses(OTHERS, questions.documents, preferences.others)
        measurements.append(replace(others, subjects=preferences.subjects))
    if (texts := questions.other_texts) is not None:
        every = list(range(len(texts.documents)))
        measurements.append(losses(OTHER_TEXTS, texts.documents, every, objective=None))
    if questions.prompts:
        measurements.append(_samples(questions, world=world))
    return measurements + [_task(name, questions, world=world) for name in questions.tasks]


def _losses(
    name: str,
    documents: Sequence[Document],
    numbers: list[int],
    *,
    questions: Questions,
    objective: TokenObjective | None,
    world: World | None,
) -> Part:
    """Return the measurement of the loss of `documents` with these numbers."""

    def compute(model: Model | StreamedModel) -> list[list[Any]]:
        def sums(own: list[int]) -> list[HeldoutSums]:
            chosen = [documents[number] for number in own]
            summed = None if objective is None else objective.summed(own)
            if isinstance(model, StreamedModel):
                return model.losses(chosen, summed)
            batch_size, device = questions.settings.batch_size, model.device
            return heldout_sums(
                model, chosen, batch_size=batch_size, device=device, objective=summed
            )

        sharded = None if isinstance(model, StreamedModel) else model
        every = shared_out(numbers, sums, world=world, model=sharded)
        return [[value for value in document if value is not None] for document in every]

    facts: dict[str, Any] = {"documents": _digest([documents[number] for number in numbers])}
    if objective is not None:
        facts |= objective.facts(numbers)
    return Part(name, facts, compute)


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for ids, mask in documents:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + mask.tobytes())
    return digest.hexdigest()


def _check_finite(sums: list[list[Any]], *, subject: SubjectName) -> None:
    loss = sum(nll for nll, *_ in sums) / sum(tokens for _, tokens, *_ in sums)
    if not loss < math.log(1e300):  # also true of NaN
        raise UserError(
            f"The loss of {FORMS[subject].label} is {loss}: its weights are broken. "
            "If only those with the adapter are, training diverged: lower train.learning_rate."
        )


def _samples(questions: Questions, *, world: World | None) -> Part:
    settings, tokenizer = questions.settings, questions.tokenizer

    def compute(model: Model) -> list[str]:
        how = AnswerSettings(
            stop_ids=stop_token_ids(questions.prompts, tokenizer=tokenizer, model=model),
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
        )

        def of(mine: list[Prompt]) -> list[list[int]]:
            return generate_answers(model, mine, settings=how, device=model.device)

        answers = shared_out(questions.prompts, of, world=world, model=model)
        return [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]

    facts = {
        "prompts": [[p.document, p.prompt, p.reference[-1]] for p in questions.prompts],
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 0.0,  # archives name it, and a seed of drawn answers
        "seed": None,
    }
    return Part("samples", facts, compute)


def _task(name: str, questions: Questions, *, world: World | None) -> Part:
    tasks, tokenizer = questions.tasks[name], questions.tokenizer

    def compute(model: Model) -> dict[str, Any]:
        scores = run_tasks(
            model, tasks, tokenizer=tokenizer, settings=questions.settings, world=world
        )
        return scores.to_json()

    facts = task_facts(tasks, settings=questions.settings, tokenizer=tokenizer)
    return Part(f"task-{name}", facts, compute)


def parts_of(subject: Subject, parts: Sequence[Part]) -> list[Part]:
    own = [part for part in parts if subject.name in part.subjects]
    return [part for part in own if part.name in STREAMED or not subject.streamed]


def measure(
    subject: Subject,
    parts: Sequence[Part],
    *,
    archive: Archive,
    machine: dict[str, Any],
    world: World | None = None,
) -> tuple[Measurement, list[str]]:
    """Return the subject's answers, and the parts measured now: it is opened only if one is not
    archived. machine: types, attention, versions. Collective: the main process has the files."""
    is_main = world is None or world.is_main
    parts = parts_of(subject, parts)
    values = agreed(
        {
            part.name: archive.find(subject.key, part.name, machine | part.facts)
            for part in parts
            if is_main
        },
        world=world,
    )
    missing = [name for name, value in values.items() if value is None]
    if missing:
        with subject.opened() as model:
            for part in (part for part in parts if part.name in missing):
                value = part.compute(model)
                if part.name in LOSSES:
                    _check_finite(value, subject=subject.name)
                if is_main:
                    archive.keep(subject.key, part.name, machine | part.facts, value)
                values[part.name] = value
    return _measurement(values), missing


def _measurement(values: dict[str, Any]) -> Measurement:
    tasks = NO_SCORES
    for name, value in values.items():
        if name.startswith("task-"):
            tasks |= TaskScores.from_json(value)
    sums = {name: [HeldoutSums(*stored) for stored in values.get(name, [])] for name in LOSSES}
    losses: dict[str, list[Loss]] = {
        name: [(each.nll, each.tokens) for each in documents] for name, documents in sums.items()
    }
    return Measurement(
        losses=losses[HELDOUT],
        tasks=tasks,
        answers=list(values.get("samples", [])),
        others=losses[OTHERS],
        objective=[each.objective for each in sums[HELDOUT] if each.objective is not None],
        other_texts=losses[OTHER_TEXTS],
    )

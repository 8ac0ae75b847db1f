"""Measurements of the subjects as JSON artifacts, computed from stored answers, and the cost of 4
bits: the losses that the base's calibration has measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.evaluation_record import (
    Comparison,
    DocumentLoss,
    Evaluation,
    FourBits,
    Items,
    LossDifference,
    Sample,
    SourceLoss,
    SubjectItems,
    TaskItems,
    TextDifference,
    TextLoss,
    four_bits_cost,
)
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import CalibrationFacts, Interval, Provenance, Quantization
from workflow.lib.checkpoints.safetensors_reader import QUANTIZATION
from workflow.lib.evaluation.questions import Measurement, Questions
from workflow.lib.evaluation.rewards import objective_record, rewards_difference, rewards_record
from workflow.lib.evaluation.task_scores import (
    Array,
    Loss,
    by_source,
    difference_fields,
    loss_fields,
    overlap_shares,
    task_differences,
    text_difference_fields,
)
from workflow.lib.settings.forms import FORMS, REFERENCES, SUBJECTS, SubjectName
from workflow.lib.system.redaction import public_name, redacted


def four_bits_of(base: Path) -> FourBits | None:
    """Return the base's calibration losses on held-out documents, or None."""
    record = _quantization(base)
    calibration = record and record.calibration
    return summarize(calibration) if calibration and calibration.heldout.tokens else None


def method_of(base: Path) -> str | None:
    """Return a base's quantization method, its reason if it was a choice, and how many linears and
    stacks of experts are in 16 bits beside it; None if unknown."""
    if (record := _quantization(base)) is None:
        return None
    reason = "" if record.method_reason is None else f" ({record.method_reason})"
    packed, kept = record.quantized_linears + record.quantized_stacks, record.kept
    beside = f", {kept} of {packed + kept} in 16 bits" if packed and kept else ""
    return f"{record.method}{reason}{beside}"


def _quantization(base: Path) -> Quantization | None:
    path = base / QUANTIZATION
    return read_record(path, Quantization) if path.is_file() else None


def summarize(calibration: CalibrationFacts) -> FourBits:
    losses = calibration.heldout
    return FourBits(
        documents=len(losses.tokens),
        original=sum(losses.original) / sum(losses.tokens),
        absmax=_difference(losses.absmax, losses.original, losses.tokens),
        calibrated=_difference(losses.calibrated, losses.original, losses.tokens),
        won_back=_difference(losses.absmax, losses.calibrated, losses.tokens),
    )


def _difference(
    first: Sequence[float], second: Sequence[float], tokens: Sequence[int]
) -> LossDifference:
    """Return first - second per token, with its interval."""
    pairs = [((x, n), (y, n)) for x, y, n in zip(first, second, tokens, strict=True)]
    return LossDifference(**difference_fields(pairs))


Losses = Sequence[Loss]


def evaluations(
    measured: Mapping[SubjectName, Measurement],
    questions: Questions,
    *,
    run: str,
    served: SubjectName,
    four_bits: FourBits | None = None,
    quantized_by: str | None = None,
) -> dict[SubjectName, Evaluation]:
    """Return the artifacts of all subjects by name, in display order. four_bits: of a calibrated
    base; quantized_by: of `method_of`."""
    shown = [name for name in SUBJECTS if name in measured]
    questions, provenance = _with_reference(questions, measured), Provenance.now()
    what = questions.preferences.what if questions.preferences else "documents"
    return {
        name: Evaluation(
            subject=name,
            run=run,
            served=name == served,
            heldout=_text_loss(_per_document(measured[name], questions), what),
            other_texts=_text_loss(_other_texts(measured[name], questions), "texts"),
            tasks=measured[name].tasks.scores,
            samples=_samples(measured[name], questions),
            comparisons={
                other: compare(measured[other], measured[name], questions)
                for other in shown[:position]
            },
            **_rewards(name, measured, questions),
            **_student(name, measured, questions),
            four_bits=four_bits if name == "base" else None,
            quantized_by=quantized_by if name == "base" else None,
            provenance=provenance,
        )
        for position, name in enumerate(shown)
    }


def _with_reference(questions: Questions, measured: Mapping[SubjectName, Measurement]) -> Questions:
    """Return the questions with the measured reference of the preferences, if it is a subject."""
    preferences = questions.preferences
    if preferences is None or preferences.measured_reference is None:
        return questions
    losses = _answer_losses(measured[preferences.measured_reference], questions)
    assert losses is not None, "the answers to the reference are measured"
    return replace(questions, preferences=preferences.with_reference(losses))


def _rewards(
    name: SubjectName, measured: Mapping[SubjectName, Measurement], questions: Questions
) -> dict[str, Any]:
    """Return rewards and the objective's loss, against that of the reference, or without one of the
    first measured of `REFERENCES`."""
    losses, preferences = _answer_losses(measured[name], questions), questions.preferences
    if losses is None or preferences is None:
        return {}
    others: dict[str, Mapping[int, Loss] | None] = {
        FORMS[x].label: _answer_losses(measured[x], questions) for x in REFERENCES if x in measured
    }
    if preferences.reference is not None:
        others = {"reference": preferences.reference_losses(losses)}
    against, before = next((item for item in others.items() if item[1]), ("itself", losses))
    assert before is not None
    examples = map(preferences.example_losses, (before, losses))
    record = objective_record(
        *examples, of=preferences.examples, against=against, sources=preferences.sources
    )
    if name == preferences.measured_reference:
        return {"objective": record}  # its rewards are 0
    return {"objective": record, "rewards": rewards_record(preferences, losses)}


def _student(
    name: SubjectName, measured: Mapping[SubjectName, Measurement], questions: Questions
) -> dict[str, Any]:
    """Return the loss by a teacher, against that of the NF4 base, or if it is not measured of the
    original."""
    objective = questions.objective
    if objective is None or objective.is_weighted_loss or not measured[name].objective:
        return {}
    reference = next(x for x in reversed(REFERENCES) if x in measured)
    before, after = (
        objective.example_losses(questions.losses_of, x.losses, x.objective)
        for x in (measured[reference], measured[name])
    )
    record = objective_record(
        before,
        after,
        of="documents",
        against=FORMS[reference].label,
        sources=questions.sources,
    )
    return {"objective": record}


def _reward_difference(
    before: Measurement, after: Measurement, questions: Questions
) -> dict[str, Any]:
    old, new = (_answer_losses(measured, questions) for measured in (before, after))
    preferences = questions.preferences
    if old is None or new is None or preferences is None or preferences.reference is not None:
        return {}  # of a reference the rewards are 0
    return {"rewards": rewards_difference(preferences, old, new)}


def _answer_losses(measured: Measurement, questions: Questions) -> dict[int, Loss] | None:
    """Return the losses of both answers of all examples by document, if they were measured."""
    if (preferences := questions.preferences) is None or not measured.others:
        return None
    numbers = [*preferences.losses_of, *preferences.others]
    return dict(zip(numbers, [*measured.losses, *measured.others], strict=True))


def _samples(measured: Measurement, questions: Questions) -> list[Sample]:
    def decode(ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = str(questions.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        return redacted(text)

    if not measured.answers:  # of a model that was streamed layer by layer
        return []
    return [
        Sample(
            document=prompt.document,
            prompt=decode(prompt.prompt),
            reference=decode(prompt.reference, skip_special_tokens=True),
            answer=redacted(answer),
        )
        for prompt, answer in zip(questions.prompts, measured.answers, strict=True)
    ]


def _text_loss(documents: Sequence[DocumentLoss], what: str) -> TextLoss | None:
    if not documents:
        return None
    return TextLoss(
        **_loss_fields(documents),
        of=what,
        sources={
            name: SourceLoss(**_loss_fields(own))
            for name, own in by_source(documents, [each.source for each in documents]).items()
        },
        per_document=list(documents),
    )


def _loss_fields(documents: Sequence[DocumentLoss]) -> dict[str, Any]:
    plain = [(each.loss_sum, each.tokens) for each in documents]
    return loss_fields([each.loss for each in documents], plain)


def _other_texts(measured: Measurement, questions: Questions) -> list[DocumentLoss]:
    kinds = questions.other_texts.kinds if questions.other_texts else []
    return [
        DocumentLoss(document=number, source=kind, loss_sum=nll, tokens=int(tokens))
        for number, (kind, (nll, tokens)) in enumerate(
            zip(kinds, measured.other_texts, strict=True)
        )
    ]


def _losses(measured: Measurement, questions: Questions) -> Losses:
    """Return the held-out loss and the size of each document: of -log p, by the tokens' weights."""
    objective = questions.objective
    if objective is None or not objective.is_weighted_loss or not measured.losses:
        return measured.losses
    return objective.example_losses(questions.losses_of, measured.losses, measured.objective)


def _per_document(measured: Measurement, questions: Questions) -> list[DocumentLoss]:
    if not measured.losses:
        return []
    losses = _losses(measured, questions)
    every = zip(questions.losses_of, questions.sources, measured.losses, losses, strict=True)
    weighted = losses is not measured.losses
    return [
        DocumentLoss(
            document=number,
            source=source,
            loss_sum=nll,
            tokens=int(tokens),
            **({"weighted_sum": loss[0], "weight": loss[1]} if weighted else {}),
        )
        for number, source, (nll, tokens), loss in every
    ]


def items_of(
    measured: Mapping[SubjectName, Measurement],
    questions: Questions,
    *,
    run: str,
    served: SubjectName,
    rows: Array,
) -> Items:
    """Return the items of the statistics; rows: token ids of the training rows."""
    public = replace(questions, sources=[public_name(source) for source in questions.sources])
    subjects = {
        name: SubjectItems(
            losses=_per_document(measured[name], public),
            tasks=[TaskItems(**entry) for entry in measured[name].tasks.to_json()["items"]],
        )
        for name in SUBJECTS
        if name in measured
    }
    loaded = {n: task for tasks in questions.tasks.values() for n, task in tasks["tasks"].items()}
    return Items(
        run=run,
        served=served,
        subjects=subjects,
        overlap=overlap_shares(loaded, rows, questions.tokenizer),
        provenance=Provenance.now(),
    )


def compare(before: Measurement, after: Measurement, questions: Questions) -> Comparison:
    heldout, texts = (
        _text_difference(*(losses(measured, questions) for measured in (before, after)))
        for losses in (_per_document, _other_texts)
    )
    optional = {"other_texts": TextDifference(**texts)} if texts["documents"] else {}
    return Comparison(
        **heldout,
        tasks=task_differences(before.tasks, after.tasks),
        **dict[str, Any](optional),
        **_reward_difference(before, after, questions),
    )


def _text_difference(
    before: Sequence[DocumentLoss], after: Sequence[DocumentLoss]
) -> dict[str, Any]:
    pairs = [(old.loss, new.loss) for old, new in zip(before, after, strict=True)]
    return text_difference_fields(pairs, [each.source for each in before])


def summary_lines(results: Mapping[SubjectName, Evaluation]) -> list[str]:
    """Return the cost of 4 bits, and each subject against the reference (`REFERENCES`), as lines of
    text: name, before -> after, the signed difference and its interval."""
    reference = next(name for name in REFERENCES if name in results)
    return [
        *_four_bits_lines(results),
        *(
            line
            for name, after in results.items()
            if name != reference
            for line in _comparison_lines(results[reference], after)
        ),
        *(line for after in results.values() for line in _objective_lines(after)),
        *(line for after in results.values() for line in _reward_lines(after)),
    ]


def _four_bits_lines(results: Mapping[SubjectName, Evaluation]) -> list[str]:
    if (cost := four_bits_cost(results)) is None:
        return []
    by = ", as its calibration measured" if cost.measured_by == "calibration" else ""
    paired = _signed(cost.nats, cost.ci95, cost.p_value)
    return [f"cost of 4 bits: NF4 base - original {paired}, {cost.documents} documents{by}"]


def _comparison_lines(before: Evaluation, after: Evaluation) -> list[str]:
    old, new = (FORMS[results.subject].label for results in (before, after))
    comparison = after.comparisons[before.subject]
    lines = []
    if before.heldout is not None and after.heldout is not None:
        assert comparison.loss_difference is not None, "both subjects have a loss"
        losses = f"{before.heldout.loss:.4f} -> {after.heldout.loss:.4f}"
        gain = _signed(
            comparison.loss_difference, comparison.loss_difference_ci95, comparison.p_value
        )
        lines.append(
            f"held-out loss {losses}: {old} - {new} {gain}, {comparison.documents} "
            f"{after.heldout.of}"
        )
    for task, metrics in comparison.tasks.items():
        for metric, paired in metrics.items():
            scores = [results.tasks[task].metrics[metric].value for results in (before, after)]
            gain = _signed(paired.difference, paired.difference_ci95, paired.p_value)
            lines.append(
                f"{task} {metric} {scores[0]:.4f} -> {scores[1]:.4f}: {new} - {old} {gain}"
            )
    return lines


def _objective_lines(measured: Evaluation) -> list[str]:
    if (own := measured.objective) is None or (gain := own.loss_difference) is None:
        return []
    subject = FORMS[measured.subject].label
    return [
        f"objective's loss of {subject} on {own.documents} held-out {own.of} {own.loss:.4f}: "
        f"{own.against} - {subject} {_signed(gain, own.loss_difference_ci95, own.p_value)}"
    ]


def _reward_lines(measured: Evaluation) -> list[str]:
    if (rewards := measured.rewards) is None:
        return []
    ratio, ci95 = rewards.chosen_log_ratio, rewards.chosen_log_ratio_ci95
    moved = "" if ratio is None else f"; log p - log p_ref of a token {_signed(ratio, ci95, None)}"
    return [
        f"rewards of {FORMS[measured.subject].label} on {rewards.examples} held-out {rewards.of}: "
        f"{rewards.accuracy:.1%} right ({_interval(rewards.accuracy_ci95)}), margin "
        f"{_signed(rewards.margin, rewards.margin_ci95, None)}{moved}"
    ]


def _signed(value: float, ci95: Interval | None, p_value: float | None) -> str:
    test = "" if p_value is None else f", p = {p_value:.2g}"
    return f"{value:+.4f} ({_interval(ci95)}){test}"


def _interval(ci95: Interval | None) -> str:
    return "no interval" if ci95 is None else f"95% interval {ci95[0]:+.4f} to {ci95[1]:+.4f}"

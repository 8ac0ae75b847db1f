"""What is measured on base and tuned, and the two JSON artifacts made of it (fields: docs/design.md).

`prepare` settles the questions before any weight is loaded, `measure` puts them to one subject, and
`artifact` and `compare` turn measurements into JSON. Both subjects get exactly the same questions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from workflow.lib.bootstrap import estimate_ratio
from workflow.lib.config import EvaluateConfig
from workflow.lib.errors import UserError, setting_error
from workflow.lib.harness import LoadedTasks, TaskScores, load_tasks, run_tasks, task_differences
from workflow.lib.heldout import choose_documents, heldout_losses
from workflow.lib.sampling import Prompt, choose_prompts, greedy_answers, stop_token_ids
from workflow.lib.tokens import Document, TokenStore


@dataclass(frozen=True)
class Questions:
    """What both subjects are asked. `losses_of`: documents whose loss is measured, by number; may be none."""

    settings: EvaluateConfig
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Document]
    losses_of: list[int]
    prompts: list[Prompt]
    tasks: LoadedTasks


@dataclass(frozen=True)
class Measurement:
    """What one subject answered: (summed loss, tokens) by document of `losses_of`, tasks, one text per prompt."""

    losses: list[tuple[float, int]]
    tasks: TaskScores
    answers: list[str]


def prepare(
    store: TokenStore, *, tokenizer: PreTrainedTokenizerBase, settings: EvaluateConfig
) -> Questions:
    """Choose documents and prompts and load the tasks.

    Raises `UserError` if a task cannot run (`harness.load_tasks`), or if the held-out loss is asked for
    and fewer than two documents have trained tokens: there would be no interval.
    """
    documents = store.heldout_documents()
    chosen = choose_documents(documents, at_most=settings.max_documents, seed=settings.seed)
    if settings.heldout and len(chosen) < 2:
        raise setting_error(
            "evaluate.heldout",
            True,
            f"an interval needs at least 2 held-out documents with trained tokens, and there are {len(chosen)}",
            "Raise evaluate.max_documents, hold out more rows (data.heldout or data.heldout_share), or set it to false",
        )
    return Questions(
        settings=settings,
        tokenizer=tokenizer,
        documents=documents,
        losses_of=chosen if settings.heldout else [],
        prompts=choose_prompts(documents, chosen, count=settings.samples, seed=settings.seed),
        tasks=load_tasks(
            settings,
            tokenizer=tokenizer,
            trained_template_sha256=store.manifest["chat_template_sha256"],
        ),
    )


def measure(model: PeftModel, questions: Questions, *, subject: str) -> Measurement:
    """Put the questions to `model` as it is now (adapter on or off)."""
    settings, tokenizer = questions.settings, questions.tokenizer
    losses = heldout_losses(
        model,
        [questions.documents[number] for number in questions.losses_of],
        batch_size=settings.batch_size,
        device=model.device,
        description=f"{subject}: held-out loss",
    )
    answers = greedy_answers(
        model,
        questions.prompts,
        stop_ids=stop_token_ids(questions.prompts, tokenizer=tokenizer, model=model),
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        device=model.device,
        description=f"{subject}: samples",
    )
    tasks = run_tasks(model, questions.tasks, tokenizer=tokenizer, settings=settings)
    texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
    return Measurement(losses=losses, tasks=tasks, answers=texts)


def artifact(
    measured: Measurement, questions: Questions, *, subject: str, run: str
) -> dict[str, Any]:
    """Return the fields that both artifacts share; raises `UserError` if a loss is not finite."""
    decode = questions.tokenizer.decode
    return {
        "subject": subject,
        "run": run,
        "heldout": _heldout(measured, questions, subject=subject),
        "tasks": measured.tasks.scores,
        "samples": [
            {
                "document": prompt.document,
                "prompt": decode(prompt.prompt),
                "reference": decode(prompt.reference, skip_special_tokens=True),
                "answer": answer,
            }
            for prompt, answer in zip(questions.prompts, measured.answers, strict=True)
        ],
    }


def _heldout(measured: Measurement, questions: Questions, *, subject: str) -> dict[str, Any] | None:
    if not measured.losses:
        return None
    sums, tokens = zip(*measured.losses, strict=True)
    loss = sum(sums) / sum(tokens)
    if not loss < math.log(1e300):  # also true of NaN
        raise UserError(
            f"The held-out loss of the {subject} model is {loss}: its weights are broken. "
            "If only the tuned model's is, training diverged: lower train.learning_rate."
        )
    estimate = estimate_ratio(
        sums, tokens, resamples=questions.settings.bootstrap_resamples, seed=questions.settings.seed
    )
    return {
        "loss": loss,
        "loss_ci95": list(estimate.ci95),
        "perplexity": math.exp(loss),
        "documents": len(sums),
        "trained_tokens": sum(tokens),
        "per_document": [
            {"document": number, "loss_sum": loss_sum, "tokens": count}
            for number, (loss_sum, count) in zip(questions.losses_of, measured.losses, strict=True)
        ],
    }


def compare(base: Measurement, tuned: Measurement, *, settings: EvaluateConfig) -> dict[str, Any]:
    """Return the artifact's `comparison`; the loss fields are None if no loss was measured."""
    resamples, seed = settings.bootstrap_resamples, settings.seed
    tasks = task_differences(base.tasks, tuned.tasks, resamples=resamples, seed=seed)
    loss: dict[str, Any] = dict.fromkeys(
        ("loss_difference", "loss_difference_ci95", "p_value"), None
    )
    if base.losses:
        gains = [b - t for (b, _), (t, _) in zip(base.losses, tuned.losses, strict=True)]
        tokens = [count for _, count in base.losses]
        estimate = estimate_ratio(gains, tokens, resamples=resamples, seed=seed)
        loss["loss_difference"] = estimate.value
        loss["loss_difference_ci95"] = list(estimate.ci95)
        loss["p_value"] = estimate.p_value
    return {**loss, "documents": len(base.losses), "tasks": tasks}


def summary_lines(base: dict[str, Any], tuned: dict[str, Any]) -> list[str]:
    """Return the comparison as lines of text: what, base -> tuned, the signed difference and its interval."""
    comparison = tuned["comparison"]
    lines = []
    if tuned["heldout"] is not None:
        gain = _signed(comparison["loss_difference"], comparison["loss_difference_ci95"])
        lines.append(
            f"held-out loss {base['heldout']['loss']:.4f} -> {tuned['heldout']['loss']:.4f}: base - tuned {gain}, "
            f"p = {comparison['p_value']:.2g}, {comparison['documents']} documents"
        )
    for task, metrics in comparison["tasks"].items():
        for metric, paired in metrics.items():
            before, after = (a["tasks"][task]["metrics"][metric]["value"] for a in (base, tuned))
            gain = _signed(paired["difference"], paired["difference_ci95"])
            lines.append(f"{task} {metric} {before:.4f} -> {after:.4f}: tuned - base {gain}")
    return lines


def _signed(value: float, ci95: list[float] | None) -> str:
    interval = "no interval" if ci95 is None else f"95% interval {ci95[0]:+.4f} to {ci95[1]:+.4f}"
    return f"{value:+.4f} ({interval})"

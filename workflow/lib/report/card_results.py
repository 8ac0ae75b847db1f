"""The results in a model card: scores of each form of the model, and llama.cpp's of GGUF files."""

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.gguf_record import GgufChecks, GgufFile
from workflow.lib.artifacts.records import Interval
from workflow.lib.report.card_inputs import CardInputs, code, text
from workflow.lib.report.verdict import label
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECT_MEANINGS
from workflow.lib.system.number_formats import (
    count,
    general,
    loss,
    probability,
    share,
    signed,
    size,
    visible,
)

# By what a metric's paired interval says (`TaskScore.change`).
CHANGE_SENTENCES = {
    "better": "Better than the {}, by the 95% interval: {}.",
    "worse": "Worse than the {}, by the 95% interval: {}.",
    "without a clear change": "No clear change against the {}: {}.",
    "not judged": "Not judged, for want of an interval or of a direction: {1}.",
}
OUTCOME_WORDS = {
    "improved": "lower than",
    "worsened": "higher than",
    "unclear": "not clearly different from",
}
GGUF_MEANING = (
    "Each file was run by llama.cpp on the CPU, beside the same model in Transformers: the loss of "
    "held-out tokens (nats per token) and what is allowed, and greedy answers that are equal token "
    "by token. The token ids of prompts are the same in both. The tokens are too few to compare "
    "formats."
)


def verdict_sentence(inputs: CardInputs) -> str:
    """Return what the rewards, if it has any, and the held-out loss of what is served say."""
    return " ".join([*_reward_sentences(inputs), _loss_sentence(inputs)])


def _reward_sentences(inputs: CardInputs) -> list[str]:
    if (rewards := inputs.measured.served.rewards) is None:
        return []
    return [
        f"Of {count(rewards.examples)} held-out {rewards.of}, its rewards are right in "
        f"{share(rewards.accuracy)} {_shares(rewards.accuracy_ci95)}; chance is one half."
    ]


def _loss_sentence(inputs: CardInputs) -> str:
    measured = inputs.measured
    difference = measured.comparison
    if measured.loss_outcome == "not measured" or difference.loss_difference is None:
        return "Its held-out loss was not measured."
    reference, served = label(measured.reference), label(measured.served)
    heldout = measured.served.heldout
    of = "" if heldout is None or heldout.of == "documents" else f" of {heldout.of}"
    return (
        f"Its held-out loss{of} ({served}: {SUBJECT_MEANINGS[measured.served.subject]}) is "
        f"{OUTCOME_WORDS[measured.loss_outcome]} that of the {reference}: {reference} - {served} "
        f"{signed(difference.loss_difference)} {_interval(difference.loss_difference_ci95)} nats "
        "per token."
    )


def results_section(inputs: CardInputs) -> str:
    shown = list(inputs.measured.subjects.values())
    rows = [*_heldout_rows(inputs, shown), *_reward_rows(shown), *_task_rows(inputs, shown)]
    if not rows:
        return "Nothing was measured.\n"
    labels = [label(found) for found in shown]
    head = f"| measured | {' | '.join(labels)} | difference |\n|{'---|' * (len(labels) + 2)}\n"
    return (
        head
        + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        + f"\n{_meanings(inputs)}\n"
        + "".join(f"\n- {sentence}" for sentence in _changes(inputs))
        + "\n"
    )


def _meanings(inputs: CardInputs) -> str:
    measured = inputs.measured
    meanings = [
        f"{SUBJECT_LABELS[name].capitalize() if name != 'base' else SUBJECT_LABELS[name]}: "
        f"{SUBJECT_MEANINGS[name]}."
        for name in measured.subjects
    ]
    cost = measured.four_bits_cost
    bits = "What 4 bits cost was not measured."
    if cost is not None:
        by = ", as its calibration measured" if cost.measured_by == "calibration" else ""
        bits = (
            f"4 bits cost {signed(cost.nats)} {_interval(cost.ci95)} nats per token (NF4 base - "
            f"original){by}."
        )
    before, after = label(measured.reference), label(measured.served)
    tasks = label(measured.task_reference)
    return (
        f"{' '.join(meanings)} {bits}\nBrackets are 95% intervals; differences are paired, "
        f"held-out loss {before} - {after}, tasks {after} - {tasks}."
    )


def _changes(inputs: CardInputs) -> list[str]:
    scores, reference = inputs.measured.scores, label(inputs.measured.task_reference)
    metrics = {
        change: [f"{text(s.task)} {text(s.metric)}" for s in scores if s.change == change]
        for change in CHANGE_SENTENCES
    }
    return [
        CHANGE_SENTENCES[change].format(reference, ", ".join(some))
        for change, some in metrics.items()
        if some
    ]


def _heldout_rows(inputs: CardInputs, shown: list[Evaluation]) -> list[list[str]]:
    served, paired = inputs.measured.served.heldout, inputs.measured.comparison
    if served is None or paired.loss_difference is None:
        return []
    p = "" if paired.p_value is None else f", {probability(paired.p_value)}".replace("<", "&lt;")
    losses = [found.heldout for found in shown]
    return [
        [
            f"loss on {count(served.documents)} held-out {served.of}, nats per token",
            *(f"{loss(h.loss)} {_interval(h.loss_ci95)}" if h else "" for h in losses),
            f"{signed(paired.loss_difference)} {_interval(paired.loss_difference_ci95)}{p}",
        ],
        ["perplexity", *(general(h.perplexity) if h else "" for h in losses), ""],
    ]


def _reward_rows(shown: list[Evaluation]) -> list[list[str]]:
    found = [one.rewards for one in shown]
    if (known := next((rewards for rewards in found if rewards), None)) is None:
        return []
    return [
        [
            f"rewards that are right, of {count(known.examples)} held-out {known.of}",
            *(f"{share(r.accuracy)} {_shares(r.accuracy_ci95)}" if r else "" for r in found),
            "",
        ],
        [
            "margin of rewards",
            *(f"{signed(r.margin)} {_interval(r.margin_ci95)}" if r else "" for r in found),
            "",
        ],
    ]


def _task_rows(inputs: CardInputs, shown: list[Evaluation]) -> list[list[str]]:
    return [
        [
            f"{text(score.task)}, {text(score.metric)}, {count(score.items)} items",
            *(
                loss(found.tasks[score.task].metrics[score.metric].value)
                if score.task in found.tasks
                else ""
                for found in shown
            ),
            f"{signed(score.difference.difference)} "
            f"{_interval(score.difference.difference_ci95)}".strip(),
        ]
        for score in inputs.measured.scores
    ]


def _interval(ends: Interval | None) -> str:
    return "" if ends is None else f"\\[{loss(ends[0])}, {loss(ends[1])}\\]"


def _shares(ends: Interval | None) -> str:
    return "" if ends is None else f"\\[{share(ends[0])}, {share(ends[1])}\\]"


def gguf_section(checks: GgufChecks) -> str:
    head = "| file | size | llama.cpp | Transformers | difference | tokens | equal answers |\n"
    rows = "".join(f"| {' | '.join(_gguf_row(file))} |\n" for file in checks.files)
    commands = "".join(f"{_gguf_command(file)}\n" for file in _firsts(checks))
    return f"```bash\n{commands}```\n\n{head}|{'---|' * 7}\n{rows}\n{GGUF_MEANING}\n"


def _firsts(checks: GgufChecks) -> list[GgufFile]:
    firsts: dict[str, GgufFile] = {}
    for file in checks.files:
        firsts.setdefault(file.form, file)
    return list(firsts.values())


def _gguf_command(file: GgufFile) -> str:
    adapter = f" --lora {visible(file.adapter)}" if file.adapter else ""
    return f"llama-server -m {visible(file.file)}{adapter} --jinja"


def _gguf_row(file: GgufFile) -> list[str]:
    name = code(file.file) + (f" with {code(file.adapter)}" if file.adapter else "")
    return [
        name,
        size(file.bytes + (file.adapter_bytes or 0)),
        loss(file.loss),
        loss(file.reference_loss),
        f"{signed(file.loss - file.reference_loss)} (at most {general(file.bound)})",
        count(file.tokens),
        f"{count(file.equal_answers)} of {count(file.answers)}",
    ]

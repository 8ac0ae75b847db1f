"""Rows of preferences: two answers to one prompt, or a rated answer.

Prompt and answers of a pair become two conversations. Their common first messages are the prompt,
whether it has a column of its own or stands in both; the assistant's answers after it are trained.
Transcripts as those of HH-RLHF are divided into turns first. Two texts without a prompt are
refused: nothing in them says where one would end."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.chat_messages import Conversation, as_prefix
from workflow.lib.data.encoding.keys_read import LABEL, KeyAudit, KeySchema, judgement, row_weight
from workflow.lib.data.encoding.message_forms import Message, is_transcript, read_transcript
from workflow.lib.data.encoding.row_columns import PAIRS
from workflow.lib.data.encoding.row_formats import (
    READ,
    RowParts,
    answer_behind,
    check_has_answer,
    check_prompt_is_in,
    read_history,
    read_turns,
    row_parts,
    row_schema,
    whole_conversation,
)
from workflow.lib.data.encoding.row_values import EMPTY, RowError, json_value, kind
from workflow.lib.data.encoding.sample_encoder import Encoded, SampleEncoder
from workflow.lib.data.reading.row_chunks import Values
from workflow.lib.settings.data import DataColumns, Format

# A prompt with its tools, as in OpenAI's preference format.
FURTHER = KeySchema("further answers", frozenset())
PROMPT = KeySchema("prompt", frozenset({"messages", "tools"}))
ANSWER_KEYS = ("response", "answer", "completion", "text", "content", "messages")
# Keys of an answer's score, tried in this order; a lower rank is better.
SCORE_KEYS = ("score", "rating", "fine-grained_score", "overall_score")
RANK = "rank"

Turns = tuple[list[Message], list[float]]
"""Messages, and the weight of each in the loss."""


@dataclass(frozen=True)
class Judged:
    """Conversations that end with an answer each: of a pair the chosen one and the rejected one.
    desirable: of rated answers, whether each is good; None: they are a pair."""

    answers: list[Conversation]
    desirable: list[bool] | None = None


@cache
def judged_schema(format: Format, columns: DataColumns) -> KeySchema:
    """Return the columns of a rated row or of a pair: also its label, and the input of an
    instruction."""
    schema = row_schema(format, columns)
    judging = {columns.label or LABEL}
    if format in PAIRS:
        judging |= {columns.input} if columns.prompt == columns.instruction else set[str]()
    return replace(schema, read=schema.read | judging)


def to_judged(
    value: Values, *, format: Format, columns: DataColumns, keys: KeyAudit, rated: bool
) -> Judged:
    """Return a row's pair of answers, or its rated answer; a pair as two if `rated`. Raises
    `RowError` as `to_sample`, and for answers without a preference."""
    value, usage = keys.check(judged_schema(format, columns), value, "the row")
    weight = row_weight(usage, value, column=columns.weight)
    row = row_parts(value, usage, format=format, columns=columns, keys=keys)
    if format in PAIRS:
        answers = _pair(row, *READ_PAIR[format](row))
        judged = Judged(answers, [True, False] if rated else None)
    else:
        desirable = judgement(value, columns.label or LABEL)
        judged = Judged([_judged_answer(row, format)], [desirable])
    if weight != 1 or any(answer.weights is not None for answer in judged.answers):
        raise RowError(
            "weights of preferences: a row or a turn has a weight, and no objective of preferences "
            f"reads one; leave it out (data.leave_out: [{columns.weight}])"
        )
    return judged


def _judged_answer(row: RowParts, format: Format) -> Conversation:
    """Return the conversation of a rated row. Trained are the assistant's turns after the user's
    last one; of a prompt and its completion, the whole completion."""
    conversation = READ[format](row)
    assert isinstance(conversation, Conversation), "rated rows are conversations"
    if format == "prompt_completion":
        return conversation
    users = [n for n, m in enumerate(conversation.messages) if m["role"] == "user"]
    first = max(users, default=-1)
    trained = [is_trained and n > first for n, is_trained in enumerate(conversation.trained)]
    if not any(trained):
        raise RowError("no answer: a user's turn is the last, or the one behind it is not trained")
    return replace(conversation, trained=trained)


def _sides(row: RowParts) -> tuple[Turns, Turns]:
    columns, value = row.columns, row.value
    chosen, rejected = (
        _side(row, value.get(name), f"column {name!r}")
        for name in (columns.chosen, columns.rejected)
    )
    if columns.preference is not None:
        preference = _number(value.get(columns.preference), f"column {columns.preference!r}")
        _check_no_tie(0.0, preference)
        return (rejected, chosen) if preference > 0 else (chosen, rejected)
    names = columns.score_chosen, columns.score_rejected
    if any(value.get(name) is not None for name in names):
        better, worse = (_number(value.get(name), f"column {name!r}") for name in names)
        if better < worse:
            raise RowError(
                f"contradiction: the chosen answer has the score {better:g}, the rejected one "
                f"{worse:g}; leave the scores out (data.leave_out: [{', '.join(names)}])"
            )
        _check_no_tie(better, worse)
    return chosen, rejected


def _ranked(row: RowParts) -> tuple[Turns, Turns]:
    """Return the answers of the best and the worst score, the first of each."""
    what = f"column {row.columns.answers!r}"
    raw = row.value.get(row.columns.answers)
    items = json_value(raw, what) if isinstance(raw, str) else raw
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RowError(
            f"not a list of answers: {what} is {kind(items)}, and wanted are objects that hold an "
            "answer and its score"
        )
    if len(items) < 2:
        raise RowError(f"no pair: {what} holds {len(items)} answers, and a pair needs two")
    is_named = row.columns.score != DataColumns().score
    score_keys = (row.columns.score,) if is_named else (*SCORE_KEYS, RANK)
    score = _first_key(items[0], score_keys)
    answers, scores = [], []
    for number, item in enumerate(items, 1):
        where, text = f"answer {number} of {what}", _first_key(item, ANSWER_KEYS)
        item, _ = row.keys.check(KeySchema("answer", frozenset({text, score})), item, where)
        answers.append((item.get(text), where))
        scores.append(_number(item.get(score), f"{score} (data.columns.score) of {where}"))
    _check_no_tie(max(scores), min(scores))
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if score == RANK:
        best, worst = worst, best
    return _side(row, *answers[best]), _side(row, *answers[worst])


def _first_key(item: Values, candidates: tuple[str, ...]) -> str:
    return next((key for key in candidates if item.get(key) is not None), candidates[0])


READ_PAIR: dict[Format, Callable[[RowParts], tuple[Turns, Turns]]] = {
    "pairs": _sides,
    "ranked": _ranked,
}


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(f"no number: {what} is {value!r}")
    return number


def _check_no_tie(better: float, worse: float) -> None:
    if better == worse:
        raise RowError(f"tie: both answers have the score {better:g}")


def _side(row: RowParts, answer: Any, what: str) -> Turns:
    if answer in EMPTY:
        raise RowError(f"no pair: {what} is empty, and a pair needs both answers")
    if isinstance(answer, list) and all(isinstance(item, str) for item in answer):
        answer, *further = answer  # ms-swift's
        for _ in further:
            row.keys.count(FURTHER, what.removeprefix("column ").strip("'"))
    if is_transcript(answer):
        return read_transcript(answer, what)
    return read_turns(row, answer_behind(row, answer), what, role="assistant")


def _prompt(row: RowParts) -> tuple[list[Message], RowParts]:
    """Return the messages of the prompt's column, if any, and the row with its tools."""
    columns, keys = row.columns, row.keys
    prompt, what = row.value.get(columns.prompt), f"column {columns.prompt!r}"
    if prompt in EMPTY:
        return [], row
    if isinstance(prompt, dict) and "messages" in prompt:
        prompt, _ = keys.check(PROMPT, prompt, what)
        if prompt.get("tools") not in EMPTY:
            if row.value.get(columns.tools) not in EMPTY:
                raise RowError(f"two lists of tools: {what} and column {columns.tools!r}")
            row = row._replace(value={**row.value, columns.tools: prompt["tools"]})
        prompt = prompt["messages"]
    if columns.prompt == columns.instruction and isinstance(prompt, str):
        input_text = row.value.get(columns.input)
        prompt = prompt if input_text in EMPTY else f"{prompt}\n\n{input_text}"
    return read_turns(row, prompt, what, role="user")[0], row


def _pair(row: RowParts, chosen: Turns, rejected: Turns) -> list[Conversation]:
    """Return both conversations; the messages after their common prompt are trained."""
    row_prompt, row = _prompt(row)
    history, _ = read_history(row)
    prompt = [*history, *row_prompt]
    if not prompt:
        prompt = _prompt_of_one(chosen, rejected)
    sides = [_with_prompt(prompt, side) for side in (chosen, rejected)]
    conversations_read = [messages for messages, _ in sides]
    shared = _shared(*conversations_read)
    check_prompt_is_in(conversations_read[0][:shared], prompt, row.columns)
    conversations = []
    for messages, weights in sides:
        weights = [0.0] * shared + weights[shared:]
        check_has_answer(messages[shared:], weights)
        conversations.append(whole_conversation(messages, weights, row))
    return conversations


def _prompt_of_one(*sides: Turns) -> list[Message]:
    """Return the prompt of the one side that is a whole conversation; the other side is another
    answer to it. Empty if both or none are whole."""
    conversations = [messages for messages, _ in sides if messages[0]["role"] != "assistant"]
    if len(conversations) != 1:
        return []
    last = max(n for n, message in enumerate(conversations[0]) if message["role"] != "assistant")
    return conversations[0][: last + 1]


def _with_prompt(prompt: list[Message], side: Turns) -> Turns:
    """Return an answer after its prompt, or a whole conversation as it is."""
    messages, weights = side
    is_whole = messages[0]["role"] != "assistant" or (
        not prompt and any(message["role"] == "user" for message in messages)
    )
    if is_whole:
        return side
    if not prompt:
        raise RowError(
            "no prompt: chosen and rejected are answers, and the row has no prompt; name its "
            "column in data.columns.prompt, or write both as whole conversations (lists of "
            "messages). A prompt that is the beginning of two texts is not guessed"
        )
    return [*as_prefix(prompt, messages), *messages], [0.0] * len(prompt) + weights


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of common first messages; raises `RowError` unless answers follow."""
    if chosen == rejected:
        raise RowError("equal answers: chosen and rejected are the same")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if shared in (len(chosen), len(rejected)):
        raise RowError("no pair: one conversation is the beginning of the other")
    roles = chosen[shared]["role"], rejected[shared]["role"]
    if not shared or roles != ("assistant", "assistant"):
        raise RowError(
            f"no common prompt: chosen and rejected differ first in message {shared + 1}, which is "
            "not an answer of both"
        )
    return shared


def begin_judged(encoder: SampleEncoder, judged: Judged) -> Callable[[], list[Encoded]]:
    """Return the encoder of a row's answers, a document each (`SampleEncoder.begin`). It raises
    `RowError` too if the template writes equal answers, or unlike prompts."""
    return partial(_encoded, [encoder.begin(answer) for answer in judged.answers], judged.desirable)


def _encoded(
    begun: list[Callable[[], list[Encoded]]], desirable: list[bool] | None
) -> list[Encoded]:
    examples = [end() for end in begun]
    if any(len(documents) > 1 for documents in examples):
        raise RowError(
            "several examples: the chat template shows a turn of the answer otherwise once others "
            "follow; give one that does not in data.chat_template, or end each conversation with "
            "that turn"
        )
    documents = [document for (document,) in examples]
    prompts = [prompt_of(document.ids, document.mask).tolist() for document in documents]
    if any(prompt != prompts[0] for prompt in prompts):
        raise RowError(
            "unlike prompts: chosen and rejected have other tokens before what is trained, by the "
            "chat template, or as a first turn of one is not trained (flags of turns, data.loss_on)"
        )
    if len(documents) == 2 and np.array_equal(documents[0].ids, documents[1].ids):
        raise RowError("equal answers: the chat template writes chosen and rejected the same")
    if desirable is None:
        return documents
    return [replace(d, desirable=good) for d, good in zip(documents, desirable, strict=True)]


def prompt_of(ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Return the token ids before the first trained token."""
    return ids[: int(mask.argmax())]

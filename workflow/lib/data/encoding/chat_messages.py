"""Chat messages of several spellings, in the one form that chat templates expect.

`message_forms` gives each a role and a content. Calls and reasoning are read under any of their
names. All other keys of a message (name, ...) go to the template as they are; a text under one that
the template does not read raises `RowError`, as any other form does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workflow.lib.data.encoding.keys_read import (
    CALLS,
    FLAGS,
    MEDIA,
    MESSAGE_ALIASES,
    REASONING,
    REASONING_KEYS,
    KeyAudit,
    KeySchema,
    check_not_trained_by_role,
    flag_value,
    flags_of,
    media_error,
    weight_of,
)
from workflow.lib.data.encoding.message_forms import (
    CONTENT_KEYS,
    ROLE_KEYS,
    ROLES,
    Message,
    is_transcript,
    items_of,
    read_transcript,
    role_of,
    single_messages,
)
from workflow.lib.data.encoding.row_values import (
    EMPTY,
    RowError,
    check_json,
    check_unicode,
    json_value,
    kind,
    text_of,
    without_nulls,
)
from workflow.lib.data.encoding.tool_calls import RESULT_ID, Tool, read_calls, with_ordered_results
from workflow.lib.data.reading.row_chunks import Values

CALL_ROLES = {"function_call", "tool_call"}  # of messages whose content is a call
BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
# Flags of a turn's beginning, which the next message continues; under the first one if read.
PREFIX_KEYS = ("prefix", "partial", "prefill")
MESSAGE = KeySchema(
    "message",
    frozenset({*ROLE_KEYS, *CONTENT_KEYS, *PREFIX_KEYS, RESULT_ID}),
    passed=True,
    flags=frozenset(FLAGS),
    aliases=MESSAGE_ALIASES,
)
TEXT_PARTS = ("text", "input_text", "output_text")
PART = KeySchema("part", frozenset({"type", "text"}))
# The text of a part of a reasoning, and the kinds of such parts.
THOUGHT_KEYS = ("text", "thinking", "summary")
THOUGHT = KeySchema("part of a reasoning", frozenset({"type", "thought", *THOUGHT_KEYS}))
THOUGHTS = {
    *TEXT_PARTS,
    *("thinking", "reasoning", "reasoning_text", "summary_text"),
    *("reasoning.text", "reasoning.summary"),
}


@dataclass(frozen=True)
class Conversation:
    """Messages for the template, with tools and arguments (`template_kwargs`, which override
    `data.template_kwargs`). weights: of each message in the loss, 0: not trained; None: all are 1.
    prefills: by number of the message, its beginning that is not trained."""

    messages: list[Message]
    trained: list[bool]
    tools: list[Tool] | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    weights: list[float] | None = None
    prefills: Mapping[int, str] = field(default_factory=dict)


def read_messages(raw: Any, keys: KeyAudit, *, what: str) -> tuple[list[Message], list[float]]:
    """Return the messages of a list, or of its JSON text, and each one's weight in the loss: 0, but
    for the assistant's 1 unless one of its flags says otherwise."""
    if is_transcript(raw):
        return read_transcript(raw, what)
    items = items_of(json_value(raw, what) if isinstance(raw, str) else raw, what)
    messages: list[Message] = []
    weights: list[float] = []
    for item in single_messages(items, keys):
        message, weight = _message(item, f"message {len(messages) + 1}", keys)
        joined = _one_turn(messages[-1], message) if weights[-1:] == [weight] else None
        if joined is not None:
            messages[-1] = joined
        else:
            _check_not_reasoning_alone(messages)
            messages.append(message)
            weights.append(weight)
    _check_not_reasoning_alone(messages)
    return messages, weights


def _one_turn(before: Message, message: Message) -> Message | None:
    """Return one turn of two messages of the assistant: a reasoning with what follows it, or a turn
    with further calls; None if they are two turns."""
    if not before["role"] == message["role"] == "assistant":
        return None
    if _filled(message):
        return None
    if _is_reasoning_alone(before):
        return {**before, **message, **{key: before[key] for key in _filled(before)}}
    if "tool_calls" in message and not message["content"]:
        return {**before, "tool_calls": [*before.get("tool_calls", []), *message["tool_calls"]]}
    return None


def _filled(message: Message) -> list[str]:
    """Return the keys under which a message has a reasoning."""
    return [key for key in REASONING_KEYS if message.get(key)]


def _is_reasoning_alone(message: Message) -> bool:
    is_empty = not message["content"] and "tool_calls" not in message
    return is_empty and message["role"] == "assistant"


def _check_not_reasoning_alone(messages: list[Message]) -> None:
    if messages and _is_reasoning_alone(messages[-1]):
        raise RowError(
            f"empty: content of message {len(messages)}, a reasoning that no answer of the same "
            "weight follows"
        )


def _message(raw: Any, where: str, keys: KeyAudit) -> tuple[Message, float]:
    if not isinstance(raw, dict):
        raise RowError(f"not a message: {where} is {kind(raw)}")
    spelled = role_of(raw)
    if "from" in raw:
        _one_of(raw, ROLE_KEYS, where)
    role = ROLES.get(spelled or "")
    if role is None:
        value = next((raw[key] for key in ROLE_KEYS if raw.get(key) is not None), None)
        raise RowError(f"unknown role: {where} has {value!r}, known are {', '.join(ROLES)}")
    item, usage = keys.check(MESSAGE, raw, where)
    extras = {k: item[k] for k in usage.passed if item[k] is not None and k not in MEDIA}
    if extras:
        extras = {key: without_nulls(value) for key, value in extras.items()}
        check_unicode(extras, where)
    if role == "tool" and item.get(RESULT_ID) is not None:
        extras[RESULT_ID] = item[RESULT_ID]
    content = _one_of(item, CONTENT_KEYS, where)
    aliased = usage.aliased
    raw_calls = _one_of(item, aliased[CALLS], where) if CALLS in aliased else None
    if spelled in CALL_ROLES:
        raw_calls, content = content, ""
    calls = [] if raw_calls is None else read_calls(raw_calls, where, keys)
    if calls:
        extras["tool_calls"] = calls
    if REASONING in aliased:
        extras |= _reasonings(item, aliased[REASONING], where, keys)
    flags = flags_of(item, usage.flags, usage.passed) if usage.flags or usage.passed else []
    if role != "assistant":
        check_not_trained_by_role(flags, where)
        if calls or _filled(extras):
            names = [key for keys in aliased.values() for key in keys if item[key] not in EMPTY]
            raise RowError(
                f"not an assistant's: {where} has {' and '.join(names)}, and only assistant turns "
                f"do; leave it out (data.leave_out: [{', '.join(names)}])"
            )
        weight = 0.0
    else:
        weight = weight_of(flags, where, all_trained=keys.all_trained)
        if _is_prefix(item, where):
            extras[PREFIX_KEYS[0]] = True
    may_be_empty = role in ("system", "tool") or bool(calls or (extras and _filled(extras)))
    text = read_content(content, role, f"content of {where}", keys, may_be_empty=may_be_empty)
    if role == "assistant" and text.lstrip().startswith(BEGIN_OF_REASONING):
        _check_one_whole_reasoning(text, extras, where, is_trained=weight > 0)
    return {"role": role, "content": text, **extras}, weight


def as_prefix(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Mark the prompt's last message as the beginning of the answer's turn, if both are the
    assistant's."""
    if not (prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant"):
        return prompt
    return [*prompt[:-1], {**prompt[-1], PREFIX_KEYS[0]: True}]


def whole_turns(
    messages: list[Message], weights: list[float]
) -> tuple[list[Message], list[float], dict[int, str]]:
    """Return messages in which each beginning of a turn (`PREFIX_KEYS`) is one with what continues
    it, their weights, and these beginnings by number. Raises `RowError` if nothing continues one,
    or a result or a call is without the other."""
    prefix = PREFIX_KEYS[0]
    messages = with_ordered_results(messages)
    if not any(prefix in message for message in messages):
        return messages, weights, {}
    turns: list[Message] = []
    turn_weights: list[float] = []
    prefills: dict[int, str] = {}
    for message, weight in zip(messages, weights, strict=True):
        if turns and turns[-1].pop(prefix, False):
            before = turns.pop()
            turn_weights.pop()
            if message["role"] != "assistant":
                raise _not_continued(len(turns) + 1)
            if _filled(message):
                raise RowError(
                    f"two reasonings: a turn continues message {len(turns) + 1}, its beginning, "
                    "and has a reasoning, which belongs before that; move it there"
                )
            prefills[len(turns)] = before["content"]
            message = {**before, **message, "content": before["content"] + message["content"]}
        turns.append(dict(message))
        turn_weights.append(weight)
    if prefix in turns[-1]:
        raise _not_continued(len(turns))
    return turns, turn_weights, prefills


def _not_continued(number: int) -> RowError:
    return RowError(
        f"unfinished turn: message {number} is the beginning of a turn (prefix or partial), and no "
        "message of the assistant continues it"
    )


def _is_prefix(item: Values, where: str) -> bool:
    flags = {key: flag_value(item[key]) for key in PREFIX_KEYS if item.get(key) not in EMPTY}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise RowError(
                f"unknown beginning: {where} has {key} = {value!r}, known are true and false; "
                f"write it into the content, or leave it out (data.leave_out: [{key}])"
            )
    return any(flags.values())


def _check_one_whole_reasoning(
    content: str, extras: Message, where: str, *, is_trained: bool
) -> None:
    """Drop a reasoning key whose text the content begins with. Raises `RowError` if the two differ,
    or if the content's reasoning has no end."""
    begin, end, _ = content.partition(END_OF_REASONING)
    if is_trained and not end:
        raise RowError(
            f"unfinished reasoning: content of {where} begins with {BEGIN_OF_REASONING} and has no "
            f"{END_OF_REASONING}; a model would learn to stop within its reasoning"
        )
    for key in [key for key in REASONING_KEYS if key in extras]:
        if extras[key].strip() not in begin:
            raise RowError(
                f"two reasonings: {where} has {key}, and its content begins with another; leave "
                f"one out (data.leave_out: [{key}])"
            )
        del extras[key]


def without_tags(reasoning: str) -> str:
    """Return a reasoning without the tags around it, which are the template's."""
    inner = reasoning.strip().removeprefix(BEGIN_OF_REASONING).removesuffix(END_OF_REASONING)
    return reasoning if inner == reasoning.strip() else inner.strip()


def _reasonings(item: Values, names: tuple[str, ...], where: str, keys: KeyAudit) -> dict[str, str]:
    """Return the reasoning of a message by the key that the template reads."""
    texts: dict[str, str] = {}
    for key in names:
        text = _reasoning(item[key], key, where, keys)
        name = keys.reasoning_key(key)
        if text.strip() and any(
            other.strip() not in ("", text.strip()) for other in texts.values()
        ):
            raise RowError(
                f"two reasonings: {where} has {key} and another; leave one out "
                f"(data.leave_out: [{key}])"
            )
        if item[key] is not None and not texts.get(name):
            texts[name] = text
    check_unicode(texts, where)
    return texts


def _reasoning(value: Any, key: str, where: str, keys: KeyAudit) -> str:
    """Return the text of a reasoning, which may be a list of parts; true and false hold none."""
    if isinstance(value, bool):
        keys.count(MESSAGE, key)
    if isinstance(value, bool) or value in EMPTY:
        return ""
    if isinstance(value, list):
        texts = [_thought(part, f"{key} of {where}", keys) for part in value]
        if None not in texts:
            value = "".join(filter(None, texts))
    if not isinstance(value, str):
        raise RowError(
            f"not text: {key} of {where} is {kind(value)}; write its text, or leave it out "
            f"(data.leave_out: [{key}])"
        )
    return without_tags(value)


def _thought(part: Any, what: str, keys: KeyAudit) -> str | None:
    """Return the text of a part of a reasoning; None if it is not known as one."""
    if not isinstance(part, dict) or str(part.get("type") or "text") not in THOUGHTS:
        return None
    part, _ = keys.check(THOUGHT, part, what)
    return text_of(_one_of(part, THOUGHT_KEYS, what), what, may_be_blank=True)


def _one_of(item: Values, names: tuple[str, ...], where: str) -> Any:
    """Return the one value under any of these names; nulls do not count. Raises `RowError` for two
    values."""
    agreed = None
    for name in names:
        value = item.get(name)
        if value is None:
            continue
        if agreed is not None and agreed != value:
            raise RowError(f"two values: {where} has unlike {' and '.join(names)}")
        agreed = value
    return agreed


def read_content(content: Any, role: str, what: str, keys: KeyAudit, *, may_be_empty: bool) -> str:
    """Return a message's text; a list of parts is joined, a tool's result may be any JSON."""
    if isinstance(content, list) and (role != "tool" or _are_parts(content)):
        content = "".join(_part(part, what, keys) for part in content)
    if role == "tool" and isinstance(content, dict | list):
        check_json(content, what)
        return json.dumps(content, ensure_ascii=False)
    if may_be_empty and content in (None, ""):
        return ""
    return text_of(content, what, may_be_blank=may_be_empty)


def _are_parts(content: list[Any]) -> bool:
    """Tell whether a tool's result is a list of parts; other lists are results themselves."""
    return bool(content) and all(
        isinstance(part, dict) and str(part.get("type")) in {*TEXT_PARTS, *MEDIA}
        for part in content
    )


def _part(part: Any, what: str, keys: KeyAudit) -> str:
    """Return the text of a part of a content list; pictures and sounds have none."""
    part_type = str(part.get("type") or "text") if isinstance(part, dict) else kind(part)
    if part_type in MEDIA:
        if not keys.omit_media:
            raise media_error(f"{what} has a part of type {part_type!r}")
        keys.count(PART, part_type)
        return ""
    if part_type not in TEXT_PARTS:
        raise RowError(f"not text: {what} has a part of type {part_type!r}")
    part, _ = keys.check(PART, part, what)
    return text_of(part.get("text"), what, may_be_blank=True)

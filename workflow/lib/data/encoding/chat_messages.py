"""Chat messages of several spellings, in the one form that chat templates expect.

OpenAI's keys (role, content, tool_calls, weight) and ShareGPT's (from, value) mean the same, and so
do pairs of a question and its answer. All other keys of a message (name, reasoning_content, ...) go
to the template as they are. Any other form raises `RowError`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workflow.lib.data.encoding.keys_read import (
    FLAGS,
    MEDIA,
    REASONING_KEYS,
    KeyAccount,
    Place,
    check_not_trained_by_role,
    flags_of,
    media_error,
    weight_of,
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
from workflow.lib.data.encoding.tool_calls import Tool, read_calls
from workflow.lib.data.reading.chunks import Values

# A message for the template: `role`, `content`, perhaps `tool_calls`, and any other keys.
Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
}
CALL_ROLES = {"function_call", "tool_call"}  # of messages whose content is a call
BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
# Content blocks of Anthropic's: before the text of a message, or behind it.
BLOCKS = {"tool_result": -1, "thinking": -1, "tool_use": 1}
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
# A transcript as those of HH-RLHF, its turns, and the end of one whose answer is another column.
TRANSCRIPT = re.compile(r"\s*Human:.*\n\nAssistant:", re.DOTALL)
SPEAKER = re.compile(r"(?:^\s*|\n\n)(Human|Assistant):")
ANSWER_TO_COME = re.compile(r"\s*Assistant:\s*$")
# An item without a role may hold a question and its answer.
PAIRS = (
    ("input", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
)
CALL_KEYS = ("tool_calls", "function_call")
MESSAGE = Place(
    "message",
    frozenset({*ROLE_KEYS, *CONTENT_KEYS, *CALL_KEYS}),
    optional=frozenset(CALL_KEYS),
    passed=True,
    flags=frozenset(FLAGS),
)
# Of a tool's message without content: its result, which would be lost.
RESULT_KEY = re.compile("(tool_)?(output|result|response)s?")
TEXT_PARTS = ("text", "input_text", "output_text")
PART = Place("part", frozenset({"type", "text"}))


@dataclass(frozen=True)
class Conversation:
    """Messages for the template, with tools and arguments (`template_kwargs`, which override
    `data.template_kwargs`). weights: of each message in the loss, 0: not trained; None: all are
    1."""

    messages: list[Message]
    trained: list[bool]
    tools: list[Tool] | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    weights: list[float] | None = None


def read_messages(raw: Any, keys: KeyAccount, *, what: str) -> tuple[list[Message], list[float]]:
    """Return the messages of a list, or of its JSON text, and each one's weight in the loss: 0, but
    for the assistant's 1 unless one of its flags says otherwise."""
    if is_transcript(raw):
        return read_transcript(raw, what)
    value = json_value(raw, what) if isinstance(raw, str) else raw
    items = _by_message(value) if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RowError(f"not a list of messages: {what} is {kind(items)}")
    messages: list[Message] = []
    weights: list[float] = []
    for item in _single_messages(items, keys):
        message, weight = _message(item, f"message {len(messages) + 1}", keys)
        if messages and weight == weights[-1] and _calls_alone(messages[-1], message):
            calls = [*messages[-1].get("tool_calls", []), *message["tool_calls"]]
            messages[-1] = {**messages[-1], "tool_calls": calls}
        else:
            messages.append(message)
            weights.append(weight)
    return messages, weights


def _calls_alone(before: Message, message: Message) -> bool:
    """Tell whether a message holds only further calls of the assistant's turn before it."""
    calls = message["role"] == before["role"] == "assistant" and not message["content"]
    return calls and message.keys() == {"role", "content", "tool_calls"}


def is_transcript(given: Any) -> bool:
    return isinstance(given, str) and TRANSCRIPT.match(given) is not None


def read_transcript(text: str, what: str) -> tuple[list[Message], list[float]]:
    """Return the turns of a transcript as messages, and their weights, as `read_messages`."""
    start, *parts = SPEAKER.split(text)
    assert not start.strip(), "a transcript begins with a speaker"
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    for number, (_, said) in enumerate(pairs, 1):
        if not said.strip():
            raise RowError(f"empty: turn {number} of the transcript in {what}")
    messages = [{"role": ROLES[who.lower()], "content": said.strip()} for who, said in pairs]
    return messages, [float(message["role"] == "assistant") for message in messages]


def question_of(given: Any) -> str | None:
    """Return a transcript without the `Assistant:` at its end; None if it is none, or does not end
    with a question."""
    if not is_transcript(given):
        return None
    asked = ANSWER_TO_COME.sub("", given)
    return asked if SPEAKER.findall(asked)[-1:] == ["Human"] else None


def _by_message(value: dict[str, Any]) -> object:
    """Return a list of objects from an object of lists, as `datasets` once stored them."""
    columns = list(value.values())
    are_lists = bool(columns) and all(isinstance(column, list) for column in columns)
    if are_lists and len({len(column) for column in columns}) == 1:
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return [value] if any(key in value for key in ROLE_KEYS) else value


def _single_messages(items: list[Any], keys: KeyAccount) -> Iterator[Any]:
    """Yield each message, two for a pair of a question and its answer, with its system text before
    them unless the last pair had the same."""
    if items and all(map(_is_role_and_text, items)):
        items = [{"role": role, "content": text} for role, text in items]
    system: object = None
    for item in items:
        pair = None
        if isinstance(item, dict) and "role" not in item and "from" not in item:
            pair = next((p for p in PAIRS if all(key in item for key in p)), None)
        if pair is not None:
            more = {key: value for key, value in item.items() if key not in pair}
            said = None if "system" in keys.leave_out else more.pop("system", None)  # XTuner's
            if said not in (*EMPTY, system):
                yield {"role": "system", "content": said}
                system = said
            yield {"role": "user", "content": item[pair[0]]}
            yield {"role": "assistant", "content": item[pair[1]], **more}
        elif isinstance(item, list) and len(item) == 2:
            yield {"role": "user", "content": item[0]}
            yield {"role": "assistant", "content": item[1]}
        else:
            yield from _without_blocks(item)


def _without_blocks(item: Any) -> list[Any]:
    """Return a message, and one of Anthropic's content blocks as OpenAI's: a result of a tool is a
    message before it, calls and reasoning have keys of their own. Raises `RowError` where that
    would change the order of blocks, or replace such a key."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, list):
        return [item]
    kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in content]
    if not BLOCKS.keys() & kinds:
        return [item]
    places = [BLOCKS.get(kind, 0) for kind in kinds]
    if places != sorted(places):
        raise RowError(
            "order of content blocks: results and reasoning come first, then text, then calls, but "
            f"a message has {', '.join(kinds)}"
        )
    parts: dict[str, list[Any]] = {name: [] for name in BLOCKS}
    others: list[Any] = []
    for part, name in zip(content, kinds, strict=True):
        parts.get(name, others).append(part)
    thoughts = [_renamed(part, "thinking", "text", type="text") for part in parts["thinking"]]
    added = {"function_call": parts["tool_use"], "thinking": thoughts}
    added = {key: value for key, value in added.items() if value}
    for key in added:
        if item.get(key) is not None:
            raise RowError(f"two values: a message has {key} and content blocks of the same")
    alone = not (others or added)
    rest = {key: item[key] for key in item if key not in ("content", *ROLE_KEYS)} if alone else {}
    results = parts["tool_result"]
    messages = [rest | _renamed(x, "tool_use_id", "tool_call_id", role="tool") for x in results]
    return messages if alone else [*messages, {**item, **added, "content": others}]


def _renamed(part: Message, old: str, new: str, **more: str) -> Message:
    kept = {key: value for key, value in part.items() if key not in ("type", old)}
    return {new: part.get(old), **kept, **more}


def _is_role_and_text(item: Any) -> bool:
    """Tell whether an item is `["user", "Hi"]`, as LangChain and FastChat write messages."""
    is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
    return is_pair and item[0].strip().lower() in ROLES


def _message(raw: Any, where: str, keys: KeyAccount) -> tuple[Message, float]:
    if not isinstance(raw, dict):
        raise RowError(f"not a message: {where} is {kind(raw)}")
    item, shape = keys.take(MESSAGE, raw, where)
    given = _one_of(item, ROLE_KEYS, where)
    given = given.strip().lower().replace("-", "_") if isinstance(given, str) else given
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RowError(f"unknown role: {where} has {given!r}, known are {', '.join(ROLES)}")
    more = {k: item[k] for k in shape.passed if item[k] is not None and k not in MEDIA}
    if more:
        more = {key: without_nulls(value) for key, value in more.items()}
        for key in REASONING_KEYS & more.keys():
            more[key] = _reasoning(more[key], key, where, keys)
        check_unicode(more, where)
    content = _one_of(item, CONTENT_KEYS, where)
    raw_calls = _one_of(item, CALL_KEYS, where) if shape.has_optional else None
    if given in CALL_ROLES:
        raw_calls, content = content, ""
    calls = [] if raw_calls is None else read_calls(raw_calls, where, keys)
    if calls:
        more["tool_calls"] = calls
    flags = flags_of(item, shape.flags, shape.passed) if shape.flags or shape.passed else []
    if role != "assistant":
        check_not_trained_by_role(flags, where)
        weight = 0.0
    else:
        weight = weight_of(flags, where, all_trained=keys.all_trained)
    may_be_empty = role in ("system", "tool") or bool(calls)
    text = read_content(content, role, f"content of {where}", keys, may_be_empty=may_be_empty)
    if role == "tool" and not text:
        _check_no_other_result(item, where)
    if role == "assistant" and text.lstrip().startswith(BEGIN_OF_REASONING):
        _check_one_whole_reasoning(text, more, where, is_trained=weight > 0)
    return {"role": role, "content": text, **more}, weight


def _check_one_whole_reasoning(
    content: str, more: Message, where: str, *, is_trained: bool
) -> None:
    """Leave one reasoning to a turn whose text begins with one; raise `RowError` if they differ, or
    it has no end."""
    begin, end, _ = content.partition(END_OF_REASONING)
    if is_trained and not end:
        raise RowError(
            f"unfinished reasoning: content of {where} begins with {BEGIN_OF_REASONING} and has no "
            f"{END_OF_REASONING}; a model would learn to stop within its reasoning"
        )
    for key in REASONING_KEYS & more.keys():
        if more[key].strip() not in begin:
            raise RowError(
                f"two reasonings: {where} has {key}, and its content begins with another; leave "
                f"one out (data.leave_out: [{key}])"
            )
        del more[key]


def without_tags(reasoning: str) -> str:
    """Return a reasoning without the tags around it, which are the template's."""
    inner = reasoning.strip().removeprefix(BEGIN_OF_REASONING).removesuffix(END_OF_REASONING)
    return reasoning if inner == reasoning.strip() else inner.strip()


def _check_no_other_result(item: Values, where: str) -> None:
    for key in filter(RESULT_KEY.fullmatch, item):
        if item[key] not in EMPTY:
            raise RowError(
                f"no content, but {key}: {where} is a tool's; rename it to content, or leave it "
                f"out (data.leave_out: [{key}])"
            )


def _reasoning(value: Any, key: str, where: str, keys: KeyAccount) -> str:
    """Return the text of a reasoning, which may be a list of parts; true and false hold none."""
    if isinstance(value, bool):
        keys.count(MESSAGE, key)
    if isinstance(value, bool) or value in EMPTY:
        return ""
    if isinstance(value, list) and _are_parts(value):
        value = "".join(_part(part, f"{key} of {where}", keys) for part in value)
    if not isinstance(value, str):
        raise RowError(
            f"not text: {key} of {where} is {kind(value)}; write its text, or leave it out "
            f"(data.leave_out: [{key}])"
        )
    return without_tags(value)


def _one_of(item: Values, names: tuple[str, ...], where: str) -> Any:
    """Take the value under any of its names; a table may have all, null for the others."""
    found = None
    for name in names:
        value = item.get(name)
        if value is None:
            continue
        if found is not None and found != value:
            raise RowError(f"two values: {where} has unlike {' and '.join(names)}")
        found = value
    return found


def read_content(
    content: Any, role: str, what: str, keys: KeyAccount, *, may_be_empty: bool
) -> str:
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


def _part(part: Any, what: str, keys: KeyAccount) -> str:
    """Return the text of a part of a content list; pictures and sounds have none."""
    given = str(part.get("type") or "text") if isinstance(part, dict) else kind(part)
    if given in MEDIA:
        if not keys.omit_media:
            raise media_error(f"{what} has a part of type {given!r}")
        keys.count(PART, given)
        return ""
    if given not in TEXT_PARTS:
        raise RowError(f"not text: {what} has a part of type {given!r}")
    part, _ = keys.take(PART, part, what)
    return text_of(part.get("text"), what, may_be_blank=True)

"""Items of a conversation, of any form, as messages with a role and a content.

The forms are pairs of a question and its answer, lists of a role and a text, transcripts, objects
of lists, content blocks of Anthropic's, items of OpenAI's Responses API, and channels of Harmony.
Keys that mean nothing here stay. Any other form raises `RowError`."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.row_values import EMPTY, RowError, kind
from workflow.lib.data.encoding.tool_calls import NAMESPACE, RESULT_ID

# A message for the template: `role`, `content`, perhaps `tool_calls`, and any other keys.
Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("tool_response", "function_response", "tool_result"), "tool"),
}
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
# Content blocks of Anthropic's: before the text of a message, or behind it.
BLOCKS = {"tool_result": -1, "thinking": -1, "tool_use": 1}
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
# Of a tool's message without content: its result.
RESULT_KEY = re.compile("(tool_)?(output|result|response)s?")
RESULT_IDS = (
    "tool_use_id",
    "call_id",
    "toolCallId",
    "toolUseId",
    "callId",
)  # other names of `tool_call_id`
# Keys by which a message whose content is a text may have another form.
FORM_KEYS = {"type", "channel", "recipient", *RESULT_IDS}
CHANNELS = ("analysis", "commentary", "final")
READERS = ("", "assistant", "user", "all")  # recipients that are no function


def role_of(item: Message) -> str | None:
    """Return the role as the item spells it, in small letters."""
    role = item.get("role")
    if isinstance(role, str) and role in ROLES:
        return role
    role = next((item[key] for key in ROLE_KEYS if item.get(key) is not None), None)
    return role.strip().lower().replace("-", "_") if isinstance(role, str) else None


def is_transcript(value: Any) -> bool:
    """Tell whether a value is a text with turns of Human and Assistant, as in HH-RLHF."""
    return isinstance(value, str) and TRANSCRIPT.match(value) is not None


def read_transcript(text: str, what: str) -> tuple[list[Message], list[float]]:
    """Return the turns of a transcript as messages, and their weights, as `read_messages`."""
    start, *parts = SPEAKER.split(text)
    assert not start.strip(), "a transcript begins with a speaker"
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    for number, (_, turn) in enumerate(pairs, 1):
        if not turn.strip():
            raise RowError(f"empty: turn {number} of the transcript in {what}")
    messages = [
        {"role": ROLES[speaker.lower()], "content": turn.strip()} for speaker, turn in pairs
    ]
    return messages, [float(message["role"] == "assistant") for message in messages]


def question_of(value: Any) -> str | None:
    """Return a transcript without its last `Assistant:`; None for other texts, and for a transcript
    that does not end with a question."""
    if not is_transcript(value):
        return None
    question = ANSWER_TO_COME.sub("", value)
    return question if SPEAKER.findall(question)[-1:] == ["Human"] else None


def items_of(value: Any, what: str) -> list[Any]:
    """Return a list of items; a message alone, or an object of lists (`datasets` once stored lists
    of objects so), is one too."""
    if isinstance(value, dict):
        columns = list(value.values())
        are_lists = bool(columns) and all(isinstance(column, list) for column in columns)
        if are_lists and len({len(column) for column in columns}) == 1:
            return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
        if any(key in value for key in ROLE_KEYS):
            return [value]
    if not isinstance(value, list):
        raise RowError(f"not a list of messages: {what} is {kind(value)}")
    return value


def single_messages(items: list[Any], keys: KeyAudit) -> Iterator[Any]:
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
            extras = {key: value for key, value in item.items() if key not in pair}
            system_text = (
                None if "system" in keys.leave_out else extras.pop("system", None)
            )  # XTuner's
            if system_text not in (*EMPTY, system):
                yield {"role": "system", "content": system_text}
                system = system_text
            yield {"role": "user", "content": item[pair[0]]}
            yield {"role": "assistant", "content": item[pair[1]], **extras}
        elif isinstance(item, list) and len(item) == 2:
            yield {"role": "user", "content": item[0]}
            yield {"role": "assistant", "content": item[1]}
        elif isinstance(item, dict) and not (
            item.get("content") and isinstance(item["content"], str) and FORM_KEYS.isdisjoint(item)
        ):
            for message in _without_blocks(_response_item(item)):
                yield _result(_without_channel(message, keys), keys)
        else:
            yield item


def _is_role_and_text(item: Any) -> bool:
    """Tell whether an item is `["user", "Hi"]`, as LangChain and FastChat write messages."""
    is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
    return is_pair and item[0].strip().lower() in ROLES


def _without_blocks(item: Message) -> list[Message]:
    """Return a message, and one of Anthropic's content blocks as OpenAI's: a result of a tool is a
    message before it, calls and reasoning have keys of their own. Raises `RowError` where that
    would change the order of blocks, or replace such a key."""
    content = item.get("content")
    if not isinstance(content, list):
        return [item]
    kinds = [_block_kind(part) if isinstance(part, dict) else "" for part in content]
    if not BLOCKS.keys() & kinds:
        return [item]
    order = [BLOCKS.get(kind, 0) for kind in kinds]
    if order != sorted(order):
        raise RowError(
            "order of content blocks: results and reasoning come first, then text, then calls, but "
            f"a message has {', '.join(kinds)}"
        )
    parts: dict[str, list[Any]] = {name: [] for name in BLOCKS}
    text_parts: list[Any] = []
    for part, name in zip(content, kinds, strict=True):
        parts.get(name, text_parts).append(part)
    added = {"function_call": parts["tool_use"], "thinking": parts["thinking"]}
    added = {key: value for key, value in added.items() if value}
    for key in added:
        if item.get(key) is not None:
            raise RowError(f"two values: a message has {key} and content blocks of the same")
    alone = not (text_parts or added)
    shared_keys = _without(item, ("content", *ROLE_KEYS)) if alone else {}
    results = [
        {**shared_keys, "role": "tool", **_without(x, ("type",))} for x in parts["tool_result"]
    ]
    return results if alone else [*results, {**item, **added, "content": text_parts}]


def _block_kind(part: Message) -> str:
    """Return the type of a content block; a text marked as a thought (Gemini) is one."""
    is_thought = part.get("thought") is True or part.get("type") == "reasoning"
    return "thinking" if is_thought else str(part.get("type"))


def _without(item: Message, names: Collection[str]) -> Message:
    return {key: value for key, value in item.items() if key not in names}


def _response_item(item: Message) -> Message:
    """Return an item of OpenAI's Responses API as a message."""
    form = item.get("type")
    if form == "message":
        return _without(item, ("type",))
    if role_of(item) is not None or not isinstance(form, str):
        return item
    message = _without(item, ("type", "id"))
    if form == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name")}
        call["arguments"] = item.get("arguments")
        message = _without(message, ("call_id", "name", "arguments"))
        return {**message, "role": "assistant", "function_call": call}
    if form == "function_call_output":
        return {**message, "role": "tool"}
    if form == "reasoning":
        key = "summary" if item.get("content") in EMPTY else "content"
        message = _without(message, (key, "content"))
        return {**message, "role": "assistant", "reasoning_content": item.get(key)}
    raise RowError(f"unknown item: a message without a role has the type {form!r}")


def _without_channel(item: Message, keys: KeyAudit) -> Message:
    """Return a message of Harmony's: `analysis` is a reasoning, a recipient is the function that
    the content calls. A template that reads channels gets them as they are."""
    channel, recipient = (_word(item, key, keys) for key in ("channel", "recipient"))
    channel, calls = channel.lower(), recipient.startswith(NAMESPACE)
    if not (channel in CHANNELS or calls) or ROLES.get(role_of(item) or "") != "assistant":
        return item
    content = next((item[key] for key in CONTENT_KEYS if item.get(key) is not None), None)
    message = _without(item, ("channel", "recipient"))
    if not calls and recipient not in READERS:
        raise RowError(
            f"call of no function: a message of the channel {channel!r} has the recipient "
            f"{recipient!r}, and calls are read of {NAMESPACE}NAME alone; write it as "
            "tool_calls, or leave it out (data.leave_out: [recipient])"
        )
    if calls:
        call = {"name": recipient.removeprefix(NAMESPACE), "arguments": content}
        return {**_without(message, CONTENT_KEYS), "function_call": call}
    if channel == "analysis":
        return {**_without(message, CONTENT_KEYS), "reasoning_content": content}
    return message


def _word(item: Message, key: str, keys: KeyAudit) -> str:
    value = item.get(key)
    is_read = key not in keys.leave_out and key not in keys.template_keys
    return value.strip() if is_read and isinstance(value, str) else ""


def _result(item: Message, keys: KeyAudit) -> Message:
    """Return a tool's message with its result under `content`, and its id under `tool_call_id`."""
    if ROLES.get(role_of(item) or "") != "tool":
        return item
    names = dict.fromkeys(RESULT_IDS, RESULT_ID) if item.get(RESULT_ID) is None else {}
    if all(item.get(key) in EMPTY for key in CONTENT_KEYS):
        names |= {key: "content" for key in item if RESULT_KEY.fullmatch(key)}
    names = {k: v for k, v in names.items() if item.get(k) is not None and k not in keys.leave_out}
    if not names:
        return item
    if len({*names.values()}) < len(names):
        raise RowError(f"two values: a tool's message has {' and '.join(names)}")
    renamed = {new: item[old] for old, new in names.items()}
    return _without(item, (*names, *(CONTENT_KEYS if "content" in renamed else ()))) | renamed

"""Rows as data sets have them, and what they become, for tests."""

from typing import Any

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.settings.data import DataColumns

EXCHANGE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": EXCHANGE},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "alpaca": {"instruction": "q", "output": "a"},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}


def sample(value: dict[str, Any], format: Any, **columns: str) -> Any:
    return to_sample(value, format=format, columns=DataColumns(**columns))


def messages_of(value: dict[str, Any], format: Any, **columns: str) -> list[Any]:
    conversation = sample(value, format, **columns)
    assert isinstance(conversation, Conversation)
    return conversation.messages


def turn(role: Any = "assistant", content: Any = "a", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "q"}, {"role": role, "content": content, **more}]
    }

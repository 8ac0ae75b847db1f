"""Conversations to text through a chat template, which is code of others: Transformers runs it in Jinja's immutable sandbox.

What the template does not write would silently not be trained. So a conversation with tools is rendered once
more with every function name and tool result marked, and each mark must come back.
"""

import re
from collections import Counter
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from workflow.lib.messages import Conversation, Message, RowError, map_texts

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Templates such as Llama 3's write today's date. The same data must give the same tokens tomorrow, so
# they are given this day (the default in Llama 3.2's template): the macro shadows Transformers' function.
FIXED_DATE = "2024-07-26"
DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24')"
    " | replace('%m', '07') | replace('%B', 'July') | replace('%b', 'Jul') | replace('%d', '26')"
    " | replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00')"
    " | replace('%S', '00') }}{% endmacro %}"
)
# What a template raises at data that it was not written for.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Spans = list[tuple[int, int]]


class ChatTemplate:
    """A chat template with its variables (the tokenizer's special tokens)."""

    def __init__(self, text: str, *, variables: dict[str, Any]) -> None:
        self.has_blocks = bool(GENERATION_BLOCK.search(text))
        self._text = DATE_MACRO + text if "strftime_now" in text else text
        self._variables = variables

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Spans]:
        """Return the text, and the character spans of its generation blocks. Raises `RowError` if the template refuses."""
        try:
            rendered: Any = render_jinja_template(  # its annotation says str, it returns two lists
                [messages],
                tools=list(tools) if tools else None,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self.has_blocks,
                **self._variables,
            )
        except TEMPLATE_ERRORS as error:
            raise RowError(f"refused by the chat template: {error}") from None
        texts, spans = rendered
        return texts[0], spans[0] if spans else []

    def check_tools(self, conversation: Conversation) -> None:
        """Raise `RowError` if the template leaves out a tool, a call or a tool's result, or does not train a call."""
        if not uses_tools(conversation):
            return
        marked, expected = _marked(conversation)
        text, spans = self.render(marked.messages, tools=marked.tools)
        lost = [what for what, (mark, count) in expected.items() if text.count(mark) < count]
        if lost:
            raise RowError(
                f"tools not rendered: the chat template leaves out {lost[0]}; "
                "give one that writes tools in data.chat_template"
            )
        blocks = " ".join(text[start:end] for start, end in spans)
        outside = [name for name in _called(marked) if self.has_blocks and name not in blocks]
        if outside:
            raise RowError(
                "tools not trained: the chat template writes calls outside of its {% generation %} blocks; "
                "give one that writes them inside in data.chat_template"
            )


def uses_tools(conversation: Conversation) -> bool:
    """Tell whether a conversation offers tools, calls one, or has a result of one."""
    return bool(conversation.tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in conversation.messages
    )


def _marked(conversation: Conversation) -> tuple[Conversation, dict[str, tuple[str, int]]]:
    """Return the conversation with function names and tool results marked; and what each mark stands for, and how often."""
    tools = conversation.tools or []
    calls = [c for m in conversation.messages for c in m.get("tool_calls", ())]
    counts = Counter(entry["function"]["name"] for entry in [*tools, *calls])
    marks = {name: f"{name}Mark{number}x" for number, name in enumerate(counts)}
    expected = {f"the function {name!r}": (marks[name], count) for name, count in counts.items()}
    messages = []
    for place, message in enumerate(conversation.messages, start=1):
        changed = dict(message)
        if message["role"] == "tool":
            mark = f"Result{place}x"
            changed["content"] = message["content"] + mark
            expected[f"the result in message {place}"] = (mark, 1)
            if message.get("name") in marks:
                changed["name"] = marks[message["name"]]
        if "tool_calls" in message:
            changed["tool_calls"] = [_renamed(call, marks) for call in message["tool_calls"]]
        messages.append(changed)
    renamed = [_renamed(tool, marks) for tool in tools] or None
    return Conversation(messages, conversation.trained, renamed), expected


def _called(conversation: Conversation) -> list[str]:
    """Return the names of the functions that turns to be trained call."""
    turns = zip(conversation.messages, conversation.trained, strict=True)
    calls = [c for message, trained in turns if trained for c in message.get("tool_calls", ())]
    return [call["function"]["name"] for call in calls]


def _renamed(entry: dict[str, Any], marks: dict[str, str]) -> dict[str, Any]:
    function = entry["function"]
    return {**entry, "function": {**function, "name": marks[function["name"]]}}


def with_texts(conversation: Conversation, change: Any) -> Conversation:
    """Return the conversation with every text in it changed."""
    messages = map_texts(conversation.messages, change)
    return Conversation(messages, conversation.trained, map_texts(conversation.tools, change))

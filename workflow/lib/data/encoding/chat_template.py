"""Conversations to text through a chat template.

The template is code of others: Transformers runs it in Jinja's immutable sandbox. A text that it
leaves out would silently not be trained; `template_texts` looks for such texts."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers.utils.chat_template_utils import render_jinja_template

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.tool_calls import Tool, ToolCall, with_short_ids
from workflow.lib.data.reading.row_chunks import MAX_ROW_BYTES
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import BoundedWork
from workflow.lib.system.near_names import near_names

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
SEARCHES = {"split", "rsplit", "partition", "rpartition", "find", "startswith", "endswith"}
# Templates such as Llama 3's write today's date. Equal data must give equal tokens tomorrow, so
# templates get this day (the default in Llama 3.2's): the macro shadows Transformers' function.
FIXED_DATE = "2024-07-26"
DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24')"
    " | replace('%m', '07') | replace('%B', 'July') | replace('%b', 'Jul') | replace('%d', '26')"
    " | replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00')"
    " | replace('%S', '00') }}{% endmacro %}"
)
MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
DATE = re.compile(
    rf"\b(?:\d{{1,2}} {MONTH} \d{{4}}|{MONTH} \d{{1,2}}, \d{{4}}|\d{{4}}-\d\d-\d\d)\b"
)
# Templates write a text once, and a little around it. A tokenizer takes 150 bytes of memory for a
# byte of text.
MAX_RENDERED_CHARS = 2 * MAX_ROW_BYTES
EXCESS = (
    "data.chat_template, or without it the tokenizer's own: the chat template {excess} for one "
    "conversation, which begins with {item}. Name a template without such loops or repetitions in "
    "data.chat_template, or remove that conversation."
)
# Names that Jinja and Transformers give to every template.
OWN_NAMES = {
    *DEFAULT_NAMESPACE,
    "raise_exception",
    "strftime_now",
    "messages",
    "tools",
    "add_generation_prompt",
}

Spans = list[tuple[int, int]]
# A call with an id in OpenAI's form, to see whether a template refuses it.
_CALL: ToolCall = {
    "id": "call_0123456789",
    "type": "function",
    "function": {"name": "f", "arguments": {}},
}
_CALLED: list[Message] = [
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


def with_fixed_date(template: str) -> str:
    """Return a template that writes `FIXED_DATE` in place of today."""
    return DATE_MACRO + template if "strftime_now" in template else template


def without_generation_tags(template: str) -> str:
    """Return a template that writes the same without `{% generation %}` blocks, which some engines
    do not know: blocks without a condition, for the same white space."""

    def plain(tag: re.Match[str]) -> str:
        word = "endif" if "endgeneration" in tag[0] else "if true"
        return re.sub(r"(?:end)?generation", word, tag[0])

    return GENERATION_TAG.sub(plain, template)


class ChatTemplate:
    """A chat template with its variables. special_tokens: the tokenizer's, by their names.
    template_kwargs: arguments for conversations that do not set them."""

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, Any],
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.has_blocks = bool(GENERATION_BLOCK.search(text))
        self._source = text
        self._text = with_fixed_date(text)
        self._special_tokens = special_tokens
        self._variables = {**special_tokens, **(template_kwargs or {})}

    @cached_property
    def _tree(self) -> nodes.Template:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
        return environment.parse(GENERATION_TAG.sub("", self._source))

    @cached_property
    def searched_texts(self) -> set[str]:
        """Texts that the template searches for in a message, the end of reasoning among them."""
        searched: list[nodes.Node] = []
        for comparison in self._tree.find_all(nodes.Compare):
            if any(operand.op in ("in", "notin") for operand in comparison.ops):
                searched.append(comparison.expr)
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
                searched += call.args[:1]
        texts = [
            n.value for n in searched if isinstance(n, nodes.Const) and isinstance(n.value, str)
        ]
        return {*texts, *(text.replace("/", "", 1) for text in texts)}  # </think>, and so <think>

    def date_in(self, text: str) -> str | None:
        """Return the date in a text that the template wrote; `FIXED_DATE` if it asks for today in
        other conversations."""
        date = DATE.search(text)
        if date is None:
            return FIXED_DATE if "strftime_now" in self._source else None
        return date[0]

    @cached_property
    def arguments(self) -> set[str]:
        """Names that the template reads beside its standard variables and special tokens."""
        return meta.find_undeclared_variables(self._tree) - OWN_NAMES - set(self._special_tokens)

    def unknown_argument(self, names: Collection[str]) -> str | None:
        """Return the fault of the first name that the template does not read, or None."""
        unknown = [n for n in names if n not in self.arguments and n not in self._special_tokens]
        if not unknown:
            return None
        near = near_names(unknown[0], self.arguments)
        hint = f" (did you mean {near[0]}?)" if near else ""
        read = ", ".join(sorted(self.arguments)) or "none"
        return f"the chat template reads no argument {unknown[0]!r}{hint}; it reads {read}"

    @cached_property
    def role_of_results(self) -> str:
        """The role under which the template knows results of tools (OLMo's: environment)."""
        words = keys_in_template(self._source)
        return next((role for role in ("tool", "environment") if role in words), "tool")

    @cached_property
    def wants_json_arguments(self) -> bool:
        """Whether calls need arguments as JSON text: the template refuses objects (DeepSeek's)."""
        messages = with_short_ids(_CALLED)
        return self._refuses(messages) and not self._refuses(_with_json_arguments(messages))

    @cached_property
    def wants_short_ids(self) -> bool:
        """Whether calls need ids of nine letters: the template refuses others (Mistral's)."""
        messages = _with_json_arguments(_CALLED) if self.wants_json_arguments else _CALLED
        return self._refuses(messages) and not self._refuses(with_short_ids(messages))

    def _refuses(self, messages: list[Message]) -> bool:
        try:
            self.render(messages, tools=None)
        except RowError:
            return True
        return False

    def adapted(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its calls' arguments and ids, and the role of its results,
        in the template's form."""
        messages = conversation.messages
        if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
            return conversation
        if self.wants_json_arguments:
            messages = _with_json_arguments(messages)
        if self.wants_short_ids:
            messages = with_short_ids(messages)
        if (role := self.role_of_results) != "tool":
            messages = [m | {"role": role} if m["role"] == "tool" else m for m in messages]
        return (
            conversation
            if messages is conversation.messages
            else replace(conversation, messages=messages)
        )

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Tool] | None,
        template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Spans]:
        """Return the text, and the character spans of its generation blocks. Raises `RowError` if
        the template refuses or writes too much, `UserError` if it takes too much time or memory: a
        machine's limits must not decide which rows are trained."""
        try:
            with BoundedWork(EXCESS, str(messages[0]["content"] if messages else "")):
                rendered: Any = render_jinja_template(  # annotated as str, it returns two lists
                    [messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=self._text,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=self.has_blocks,
                    **{**self._variables, **(template_kwargs or {})},
                )
        except UserError:
            raise
        except Exception as error:  # any, for data that it was not written for
            reason = str(error) or type(error).__name__
            raise RowError(f"refused by the chat template: {reason}") from None
        texts, spans = rendered
        if len(texts[0]) > MAX_RENDERED_CHARS:
            raise RowError(
                f"too large: the chat template writes {len(texts[0])} characters, more than "
                f"{MAX_RENDERED_CHARS}"
            )
        return texts[0], spans[0] if spans else []


def _with_json_arguments(messages: list[Message]) -> list[Message]:
    changed = []
    for message in messages:
        if "tool_calls" in message:
            message = {**message, "tool_calls": [_with_json(c) for c in message["tool_calls"]]}
        changed.append(message)
    return changed


def _with_json(call: ToolCall) -> ToolCall:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def keys_in_template(text: str) -> frozenset[str]:
    """Return all text constants and attribute names of a template: keys of messages that it may
    read."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    tree = environment.parse(GENERATION_TAG.sub("", text))
    constants = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return frozenset(constants | {n.attr for n in tree.find_all(nodes.Getattr)})


def with_arguments(template: str, arguments: Mapping[str, object]) -> str:
    """Return a template with default values for these arguments (Python's literals)."""
    defaults = [
        f"{{% if {name} is not defined %}}{{% set {name} = {value!a} %}}{{% endif %}}"
        for name, value in arguments.items()
    ]
    return "".join(defaults) + template

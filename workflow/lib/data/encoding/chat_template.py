"""Conversations to text through a chat template.

The template is code of others: Transformers runs it in Jinja's immutable sandbox. What the template
does not write would silently not be trained. So a conversation with tools is rendered once more
with every function name and tool result marked, and each mark must come back.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import render_jinja_template

from workflow.lib.data.encoding.chat_messages import (
    Conversation,
    Message,
    RowError,
    Tool,
    ToolCall,
)
from workflow.lib.data.reading.row import MAX_ROW_BYTES, preview
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import BoundedWork, ExcessError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
# Attributes of Jinja's `loop`.
LOOKS_AHEAD = {"last", "length", "revindex", "revindex0", "nextitem"}
SEARCHES = {"split", "rsplit", "partition", "rpartition", "find", "startswith", "endswith"}
# Templates such as Llama 3's write today's date. The same data must give the same tokens tomorrow,
# so they are given this day (the default in Llama 3.2's template): the macro shadows Transformers'
# function.
FIXED_DATE = "2024-07-26"
DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24')"
    " | replace('%m', '07') | replace('%B', 'July') | replace('%b', 'Jul') | replace('%d', '26')"
    " | replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00')"
    " | replace('%S', '00') }}{% endmacro %}"
)
# Templates write a text once, and a little around it. A tokenizer takes 150 bytes of memory for a
# byte of text.
MAX_RENDERED_CHARS = 2 * MAX_ROW_BYTES
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
EntryT = TypeVar("EntryT", Tool, ToolCall)


def with_fixed_date(template: str) -> str:
    """Return a template that writes `FIXED_DATE` in place of the day on which it is rendered."""
    return DATE_MACRO + template if "strftime_now" in template else template


def without_generation_tags(template: str) -> str:
    """Return a template that writes the same, and which an engine can read that knows no
    `{% generation %}` blocks.

    They become blocks without a condition, so that white space around them is trimmed as before.
    """

    def plain(tag: re.Match[str]) -> str:
        word = "endif" if "endgeneration" in tag[0] else "if true"
        return re.sub(r"(?:end)?generation", word, tag[0])

    return GENERATION_TAG.sub(plain, template)


class ChatTemplate:
    """A chat template with its variables (the tokenizer's special tokens)."""

    def __init__(self, text: str, *, variables: Mapping[str, Any]) -> None:
        self.has_blocks = bool(GENERATION_BLOCK.search(text))
        self._source = text
        self._text = with_fixed_date(text)
        self._variables = variables

    @cached_property
    def _tree(self) -> nodes.Template:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
        return environment.parse(GENERATION_TAG.sub("", self._source))

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether the text of a message may depend on messages behind it; False is certain.

        Only a single loop over the messages that asks for none behind the present one is certain
        not to.
        """
        loops = [n for n in self._tree.find_all(nodes.For) if _is_name(n.iter, "messages")]
        if len(loops) != 1:
            return True
        first = [
            node
            for node in self._tree.find_all(nodes.Getitem)
            if _is_name(node.node, "messages")
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == 0
        ]
        uses = [n for n in self._tree.find_all(nodes.Name) if n.name == "messages"]
        steps = [n for n in self._tree.find_all(nodes.Getattr) if _is_name(n.node, "loop")]
        loop_names = [n for n in self._tree.find_all(nodes.Name) if n.name == "loop"]
        return (
            len(uses) > len(first) + 1
            or len(loop_names) > len(steps)
            or any(step.attr in LOOKS_AHEAD for step in steps)
        )

    @cached_property
    def has_constant_prompt(self) -> bool:
        """Whether a constant text, for the prompt of inference alone, follows the messages."""
        asked = [
            node
            for node in self._tree.body
            if isinstance(node, nodes.If) and _is_name(node.test, "add_generation_prompt")
        ]
        allowed = (
            nodes.Output | nodes.TemplateData | nodes.Const | nodes.Name | nodes.Concat | nodes.Add
        )
        names = [n for n in self._tree.find_all(nodes.Name) if n.name == "add_generation_prompt"]
        inside = [node for condition in asked for node in _below(condition.body)]
        return (
            len(names) == len(asked)
            and not any(condition.elif_ or condition.else_ for condition in asked)
            and all(isinstance(node, allowed) for node in inside)
            and all(n.name in self._variables for n in inside if isinstance(n, nodes.Name))
        )

    @cached_property
    def searched_texts(self) -> set[str]:
        """Texts that the template searches for in a message, and what they close.

        The end of the reasoning is one.
        """
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

    @cached_property
    def wants_json_arguments(self) -> bool:
        """Whether calls need arguments as JSON text: the template refuses objects (DeepSeek's)."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "ping"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return self._refuses(messages) and not self._refuses(_with_json_arguments(messages))

    def _refuses(self, messages: list[Message]) -> bool:
        try:
            self.render(messages, tools=None)
        except RowError:
            return True
        return False

    def adapted(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its calls' arguments as the template writes them."""
        if not any("tool_calls" in message for message in conversation.messages):
            return conversation
        if not self.wants_json_arguments:
            return conversation
        return replace(conversation, messages=_with_json_arguments(conversation.messages))

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Tool] | None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Spans]:
        """Return the text, and the character spans of its generation blocks.

        Raises `RowError` if the template refuses or writes too much, `UserError` if it takes too
        much time or memory: how much a machine has of them must not decide which rows are trained.
        """
        try:
            with BoundedWork():
                rendered: Any = render_jinja_template(  # annotated as str, it returns two lists
                    [messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=self._text,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=self.has_blocks,
                    **self._variables,
                )
        except TEMPLATE_ERRORS as error:
            raise RowError(f"refused by the chat template: {error}") from None
        except ExcessError as excess:
            raise _excess_error(excess, messages) from None
        texts, spans = rendered
        if len(texts[0]) > MAX_RENDERED_CHARS:
            raise RowError(
                f"too large: the chat template writes {len(texts[0])} characters, more than "
                f"{MAX_RENDERED_CHARS}"
            )
        return texts[0], spans[0] if spans else []

    def check_tools(self, conversation: Conversation) -> None:
        """Raise `RowError` if a tool, a call or its result is left out, or a call not trained."""
        if not uses_tools(conversation):
            return
        marked, expected = _marked(conversation)
        text, spans = self.render(marked.messages, tools=marked.tools)
        lost = [what for what, (mark, count) in expected.items() if text.count(mark) < count]
        if lost:
            raise RowError(
                f"tools not rendered: the chat template leaves out {lost[0]}; give one that writes "
                "tools in data.chat_template"
            )
        blocks = " ".join(text[start:end] for start, end in spans)
        outside = [name for name in _called(marked) if self.has_blocks and name not in blocks]
        if outside:
            raise RowError(
                "tools not trained: the chat template writes calls outside of its {% generation %} "
                "blocks; give one that writes them inside in data.chat_template"
            )


def _excess_error(excess: ExcessError, messages: list[Message]) -> UserError:
    beginning = preview(str(messages[0]["content"] if messages else ""))
    return UserError(
        f"data.chat_template, or without it the tokenizer's own: the chat template {excess} for "
        f"one conversation, which begins with {beginning!r}. Name a template without such loops or "
        "repetitions in data.chat_template, or remove that conversation."
    )


def _below(statements: list[nodes.Node]) -> list[nodes.Node]:
    """Return these nodes and all inside them."""
    return [*statements, *(n for node in statements for n in node.find_all(nodes.Node))]


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


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


def uses_tools(conversation: Conversation) -> bool:
    """Tell whether a conversation offers tools, calls one, or has a result of one."""
    return bool(conversation.tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in conversation.messages
    )


def _marked(conversation: Conversation) -> tuple[Conversation, dict[str, tuple[str, int]]]:
    """Return the conversation with marks in function names and tool results, and the marks.

    They come by what each stands for, with how often it is expected.
    """
    tools = conversation.tools or []
    calls = [c for m in conversation.messages for c in m.get("tool_calls", ())]
    counts = Counter(entry["function"]["name"] for entry in [*tools, *calls])
    marks = {name: f"{name}Mark{number}x" for number, name in enumerate(counts)}
    expected = {f"the function {name!r}": (marks[name], count) for name, count in counts.items()}
    messages = []
    for number, message in enumerate(conversation.messages, start=1):
        changed = dict(message)
        if message["role"] == "tool":
            mark = f"Result{number}x"
            changed["content"] = message["content"] + mark
            expected[f"the result in message {number}"] = (mark, 1)
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


def _renamed(entry: EntryT, marks: dict[str, str]) -> EntryT:
    function = entry["function"]
    return {**entry, "function": {**function, "name": marks[function["name"]]}}

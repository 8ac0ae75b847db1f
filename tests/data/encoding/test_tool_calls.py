"""Conversations with tools: calls are trained; descriptions and results are shown, not trained."""

from typing import Any

import pytest

from tests.support.encoding import TOOL_TEMPLATE, conversation, encode, trained
from workflow.lib.data.encoding.chat_messages import RowError

WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo <|end|>"}}}
AGENT = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "fog<|pad|>"},
    {"role": "assistant", "content": "Foggy."},
]
NO_BLOCKS = TOOL_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, NO_BLOCKS])
def test_calls_are_trained_and_tools_and_results_are_not(tokenizer: Any, template: str) -> None:
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    assert trained(tokenizer, encoded) == [
        'weather{"city": "Oslo <|end|>"}<|end|>',
        "Foggy.<|end|>",
    ]
    text = tokenizer.decode(encoded.ids.tolist())
    assert '"name": "weather"' in text
    assert "fog<|pad|>" in text


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, NO_BLOCKS])
def test_special_tokens_in_calls_and_results_are_ordinary_text(
    tokenizer: Any, template: str
) -> None:
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    ids = encoded.ids.tolist()
    assert encoded.held_special_text
    assert ids.count(tokenizer.eos_token_id) == len(AGENT)
    assert ids.count(tokenizer.pad_token_id) == 0


LOSSES = [
    (
        "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}",
        "",
        "the function 'weather'",
    ),
    ("c.function.name ~", "''~", "the function 'weather'"),
    ("{{ m.content + eos_token }}", "{{ eos_token }}", "the result in message 3"),
]


@pytest.mark.parametrize(("part", "replacement", "lost"), LOSSES, ids=["tools", "calls", "results"])
def test_template_that_leaves_out_what_a_tool_says_refuses_the_row(
    tokenizer: Any, part: str, replacement: str, lost: str
) -> None:
    template = TOOL_TEMPLATE.replace(part, replacement)
    assert template != TOOL_TEMPLATE
    with pytest.raises(RowError, match=f"tools not rendered: the chat template leaves out {lost}"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)


def test_template_that_writes_calls_outside_its_blocks_refuses_the_row(tokenizer: Any) -> None:
    start = "{% generation %}{{ m.content }}"
    outside = TOOL_TEMPLATE.replace(start, "").replace(
        "{{ eos_token }}{% endg", start + "{{ eos_token }}{% endg"
    )
    with pytest.raises(RowError, match="tools not trained"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), outside)

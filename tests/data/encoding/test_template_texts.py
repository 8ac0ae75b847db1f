"""Texts that a chat template leaves out: the row is dropped, or the user allows the loss."""

import pytest

from tests.support.encoding import PLAIN_TEMPLATE, TOOL_TEMPLATE, conversation, encode, trained
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder

EXCHANGE = [{"role": "user", "content": "Why is that?"}, {"role": "assistant", "content": "So."}]
SYSTEMS = [
    {"role": "system", "content": "Reply in French."},
    {"role": "system", "content": "Never mention prices."},
]
FIRST_SYSTEM_ONLY = PLAIN_TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' or m == messages[0] %}"
)
REASONED = [EXCHANGE[0], {**EXCHANGE[1], "reasoning": "A careful thought."}]


def written(content):
    """A template that writes this expression for the text of a message."""
    return PLAIN_TEMPLATE.replace("m.content", content)


@pytest.mark.parametrize(
    ("messages", "template", "lost", "kind"),
    [
        ([*SYSTEMS, *EXCHANGE], FIRST_SYSTEM_ONLY, "the system text of message 2", "system"),
        (REASONED, PLAIN_TEMPLATE, "the reasoning of message 2", "reasoning"),
        (
            [*EXCHANGE, {"role": "user", "content": "A longer question?"}, EXCHANGE[1]],
            written("(m.content if loop.index != 3 else m.content[:5])"),
            "the user text of message 3",
            "user",
        ),
    ],
    ids=["second system", "reasoning", "cut text"],
)
def test_row_is_dropped_with_a_reason_that_names_the_text_unless_its_loss_is_allowed(
    tokenizer, messages, template, lost, kind
):
    reason = rf"text not rendered: the chat template leaves out {lost}; .*unrendered: \[{kind}\]"
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, messages, template)
    encoded = encode(tokenizer, messages, template, allow_unrendered=[kind])
    assert encoded.unrendered == {kind}
    assert trained(tokenizer, encoded)[-1] == "So.<|end|>"


@pytest.mark.parametrize(
    "content", ["m.content | trim", "m.content | tojson", "m.content.replace('Why', 'How')"]
)
def test_texts_that_the_template_rewrites_but_writes_are_kept(tokenizer, content):
    messages = [{"role": "user", "content": ' Why "é"?\n'}, EXCHANGE[1]]
    assert not encode(tokenizer, messages, written(content)).unrendered


def test_text_lost_for_its_content_alone_is_found_in_a_shape_that_was_proved(tokenizer):
    template = written("(m.content if 'secret' not in m.content else '')")
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    encoder.encode(conversation(EXCHANGE))
    hidden = [{"role": "user", "content": "A secret."}, EXCHANGE[1]]
    with pytest.raises(RowError, match="the user text of message 1"):
        encoder.encode(conversation(hidden))


@pytest.mark.parametrize("value", ["Oslo", 17, 2.5, ["Oslo"], {"name": "Oslo"}])
def test_each_value_of_a_call_is_looked_for(tokenizer, value):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": value}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    messages = [EXCHANGE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    sample = conversation(messages, tools=[tool])
    assert not encode(tokenizer, sample, TOOL_TEMPLATE).unrendered
    names = TOOL_TEMPLATE.replace("arguments | tojson", "arguments | list | tojson")
    with pytest.raises(RowError, match="the call of 'weather' in message 2"):
        encode(tokenizer, sample, names)


PARAMETERS = {
    "schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "without a schema": {"city": {"type": "str", "description": "Of whom?"}},
    "named as a word of schemas": {"type": {"type": "str"}},
    "list": [{"name": "city", "type": "string"}],
}


@pytest.mark.parametrize("form", PARAMETERS)
def test_arguments_of_a_tool_are_looked_for_in_every_form(tokenizer, form):
    """Also where their names stand in the question, and after tools of other forms."""
    question = {"role": "user", "content": "Which city, of which type?"}

    def offering(parameters):
        tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        return conversation([question, EXCHANGE[1]], tools=[tool])

    properties = TOOL_TEMPLATE.replace(
        "t.function | tojson", "t.function.name ~ t.function.parameters.properties | list"
    )
    encoder = SampleEncoder(tokenizer, chat_template=properties, loss_on="completions")
    encoder.encode(offering({}))
    encoder.encode(offering(PARAMETERS["schema"]))
    if form != "schema":
        with pytest.raises(RowError, match="leaves out the tool 'weather', or an argument of it"):
            encoder.encode(offering(PARAMETERS[form]))
    assert not encode(tokenizer, offering(PARAMETERS[form]), TOOL_TEMPLATE).unrendered


def test_first_turn_has_no_prompt_and_is_not_trained(tokenizer):
    talk = [{"role": "assistant", "content": "Welcome."}, *EXCHANGE]
    encoded = encode(tokenizer, talk, PLAIN_TEMPLATE)
    assert trained(tokenizer, encoded) == ["So.<|end|>"]
    assert encoded.notes == {"begin_untrained"}
    with pytest.raises(RowError, match="its only trained turn, which has no prompt"):
        encode(tokenizer, talk[:1], PLAIN_TEMPLATE)

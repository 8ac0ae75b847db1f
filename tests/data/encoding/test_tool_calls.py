"""Conversations with tools: calls are trained; descriptions and results are shown, not trained.

Calls and tools are read in every form in which people write them."""

import json
import math
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.support.encoding import TOOL_TEMPLATE, conversation, encode, trained
from tests.support.rows import EXCHANGE, ROWS, TOOL, messages_of, sample, turn
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.tool_calls import with_short_ids

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
def test_calls_are_trained_and_tools_and_results_are_not(tokenizer, template):
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    assert trained(tokenizer, encoded) == [
        'weather{"city": "Oslo <|end|>"}<|end|>',
        "Foggy.<|end|>",
    ]
    text = tokenizer.decode(encoded.ids.tolist())
    assert '"name": "weather"' in text
    assert "fog<|pad|>" in text


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, NO_BLOCKS])
def test_special_tokens_in_calls_and_results_are_ordinary_text(tokenizer, template):
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    ids = encoded.ids.tolist()
    assert encoded.held_special_text
    assert ids.count(tokenizer.eos_token_id) == len(AGENT)
    assert ids.count(tokenizer.pad_token_id) == 0


LOSSES = [
    ("{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}", "", "the tool 'weather'"),
    ("c.function.name ~", "''~", "the call of 'weather' in message 2"),
    ("c.function.arguments | tojson", "''", "the call of 'weather' in message 2"),
    ("{{ m.content +", "{{ (m.content if m.role != 'tool' else '') +", "the result of message 3"),
]


@pytest.mark.parametrize(
    ("part", "replacement", "lost"), LOSSES, ids=["tools", "names", "arguments", "results"]
)
def test_template_that_leaves_out_what_a_tool_says_refuses_the_row(
    tokenizer, part, replacement, lost
):
    template = TOOL_TEMPLATE.replace(part, replacement)
    assert template != TOOL_TEMPLATE
    with pytest.raises(RowError, match=f"text not rendered: the chat template leaves out {lost}"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)


def test_template_that_writes_calls_outside_its_blocks_refuses_the_row(tokenizer):
    start = "{% generation %}{{ m.content }}"
    outside = TOOL_TEMPLATE.replace(start, "").replace(
        "{{ eos_token }}{% endg", start + "{{ eos_token }}{% endg"
    )
    with pytest.raises(RowError, match=r"turn not trained: .* part of message 2 outside"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), outside)


FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "tool_calls": [FUNCTION]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "tool-call", "content": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
        {"role": "assistant", "function_calls": "f(x=1)"},
        {"role": "assistant", "tool_calls": "[f(x=1)]"},
    ],
)
def test_all_spellings_of_a_call_mean_the_same(turn):
    messages = messages_of({"messages": [EXCHANGE[0], turn]}, "messages")
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("role", "result"),
    [
        ("tool", ""),
        ("function", "1"),
        ("observation", "1"),
        ("tool_response", "1"),
        ("environment", "1"),
    ],
)
def test_result_of_a_tool_is_a_message_that_may_be_empty(role, result):
    call = {"role": "assistant", "tool_calls": [{"id": "7", **CALLS[0]}]}
    messages = [EXCHANGE[0], call, {"role": role, "content": result, "tool_call_id": "7"}]
    (*_, last) = messages_of({"messages": messages}, "messages")
    assert last == {"role": "tool", "content": result, "tool_call_id": "7"}


def test_calls_one_after_the_other_are_of_one_turn():
    call = {"role": "tool_call", "content": json.dumps(FUNCTION)}
    talk = [EXCHANGE[0], {**EXCHANGE[1], "reasoning": "hm"}, call, call, {**call, "train": False}]
    said, apart = messages_of({"messages": talk}, "messages")[1:]
    assert said == {**EXCHANGE[1], "reasoning": "hm", "tool_calls": CALLS * 2}
    assert apart["tool_calls"] == CALLS
    result = {"role": "tool", "content": "r"}
    assert len(messages_of({"messages": [call, result, EXCHANGE[0], call]}, "messages")) == 4


def test_blocks_of_anthropic_are_calls_results_and_reasoning():
    text = [{"type": "text", "text": "a"}]
    use = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {"x": 1}} for n in (1, 2)]
    result = [{"type": "tool_result", "tool_use_id": t, "content": text} for t in ("t1", "t2")]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    talk = [
        EXCHANGE[0],
        {"role": "assistant", "content": [thought, *text, *use]},
        {"role": "user", "content": [*result, {"type": "text", "text": "q"}]},
        EXCHANGE[1],
    ]
    made = [{"role": "tool", "content": "a", "tool_call_id": f"t{n}"} for n in (1, 2)]
    value = {"messages": talk, "system": [{"type": "text", "text": "s"}]}
    assert messages_of(value, "messages") == [
        {"role": "system", "content": "s"},
        EXCHANGE[0],
        {**EXCHANGE[1], "tool_calls": [{"id": u["id"], **CALLS[0]} for u in use], "thinking": "hm"},
        *made,
        *EXCHANGE,
    ]


TEXT, THOUGHT = {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "hm"}
USE = {"type": "tool_use", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "r"}


@pytest.mark.parametrize(("message", "reason"), [
    ({"content": [USE, TEXT]}, "order of content blocks: .* has tool_use, text"),
    ({"content": [TEXT, THOUGHT]}, "order of content blocks: .* has text, thinking"),
    ({"role": "user", "content": [TEXT, RESULT]}, "order of content blocks: .* text, tool_result"),
    ({"content": [USE], "function_call": CALLS[0]["function"]}, "two values: .* function_call and"),
    ({"content": [THOUGHT, TEXT], "thinking": "other"}, "two values: a message has thinking and"),
    ({"role": "user", "content": [RESULT], "train": True}, "trained"),
])  # fmt: skip
def test_blocks_that_would_be_moved_or_lost_are_refused(message, reason):
    with pytest.raises(RowError, match=reason):
        messages_of({"messages": [*EXCHANGE, {"role": "assistant", **message}]}, "messages")


def test_reasoning_beside_blocks_of_calls_stays():
    said = {"role": "assistant", "content": [USE], "thinking": "hm"}
    assert messages_of({"messages": [EXCHANGE[0], said]}, "messages")[1]["thinking"] == "hm"


@pytest.mark.parametrize("spelling", [
    {"arguments": {"x": 1, "to": None}},
    {"parameters": {"x": 1}},
    {"args": '{"x": 1}'},
    {"input": {"x": 1}, "arguments": None},
    {"arguments": {}, "parameters": {"x": 1}},
    {"arguments": json.dumps('{"x": 1}')},
])  # fmt: skip
@pytest.mark.parametrize("form", ["object", "flat", "text", "text of all", "single"])
def test_arguments_are_found_in_every_form_of_a_call(spelling, form):
    call: Any = {"type": "function", "function": {"name": "f", **spelling}}
    if form == "flat":
        call = {"name": "f", **spelling}
    written = {"text": [json.dumps(call)], "text of all": json.dumps([call]), "single": call}.get(
        form, [call]
    )
    turn = {"role": "assistant", "content": None, "tool_calls": written}
    (_, message) = messages_of({"messages": [EXCHANGE[0], turn]}, "messages")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert {k: v for k, v in arguments.items() if k != "to"} == {"x": 1}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "a.f(x='1')\ng(y=[1, {'z': None}])",
            [("a.f", {"x": "1"}), ("g", {"y": [1, {"z": None}]})],
        ),
        ("[f(), g()]", [("f", {}), ("g", {})]),
    ],
)
def test_calls_of_python_are_read(text, calls):
    (_, message) = messages_of(turn(function_calls=text), "messages")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(function["name"], function["arguments"]) for function in functions] == calls


@pytest.mark.parametrize(
    "text",
    ["f(1)", "f(**x)", "f(x=y)", "f(x=1", "x = f(y=1)", "f(x=" + "[" * 5000 + "]" * 5000 + ")"],
)
def test_code_that_is_no_call_by_names_is_refused(text):
    with pytest.raises(RowError, match="calls as text: message 2 has"):
        sample(turn(function_calls=text), "messages")


TOOL_LISTS = [{"name": "f"}], [{"name": "g"}]


@pytest.mark.parametrize("holder", [
    {"tools": TOOL_LISTS[0]}, json.dumps({"tools": TOOL_LISTS[0]}),
    {"deep": [{"functions": TOOL_LISTS[0]}]}, {"tools": json.dumps(TOOL_LISTS[0])},
])  # fmt: skip
@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
def test_tools_inside_of_another_column_are_on_offer(holder, format):
    value = {**ROWS[format], "metadata": holder}
    (tool,) = sample(value, format).tools
    assert tool["function"]["name"] == "f"
    (tool,) = sample(value | {"tools": TOOL_LISTS[1]}, format).tools
    assert tool["function"]["name"] == "g"
    with pytest.raises(RowError, match=r"two lists of tools: .* give it a column 'tools'"):
        sample(value | {"extra": {"tools": TOOL_LISTS[1]}}, format)


SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


@pytest.mark.parametrize("tool", [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"name": "f", "inputSchema": SCHEMA},
])  # fmt: skip
@pytest.mark.parametrize("as_text", [False, True])
def test_list_of_tools_with_schemas_is_on_offer_under_any_name(tool, as_text):
    value = json.dumps([tool]) if as_text else [tool]
    for more in ({"available_tools": value}, {"metadata": {"toolset": value}}):
        (made,) = sample({**ROWS["messages"], **more}, "messages").tools
        assert made["function"] == {"name": "f", "parameters": SCHEMA}
    used = [{"name": "f", "parameters": {"x": "a"}}]
    assert sample({**ROWS["messages"], "used": used}, "messages").tools is None


@pytest.mark.parametrize(
    "holder", [{"tools": ["hammer"]}, {"tools": 2}, '{"tools": []}', '"tools"']
)
def test_other_values_named_tools_are_none(holder):
    assert sample({**ROWS["messages"], "metadata": holder}, "messages").tools is None


@pytest.mark.parametrize(
    ("arguments", "right"),
    [({"to": None}, {}), ('{"to": null}', {"to": None}), (None, {}), ("null", {}), ("", {})],
)
def test_nulls_are_written_only_where_they_stand_in_text(arguments, right):
    call = {"function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    (_, message) = messages_of({"messages": [EXCHANGE[0], turn]}, "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == right


@pytest.mark.parametrize(
    "form", [{"function": {"name": "f", "values": {"x": 1}}}, {"name": "f", "values": '{"x": 1}'}]
)
def test_call_whose_arguments_have_an_unknown_name_is_refused(form):
    with pytest.raises(RowError, match="no arguments, but values: a call in message 2"):
        sample(turn(tool_calls=[form]), "messages")


def test_arguments_under_two_names_are_refused():
    call = {"name": "f", "arguments": {"x": 1}, "parameters": {"x": 2}}
    with pytest.raises(RowError, match="two arguments: a call in message 2 has them under two"):
        sample(turn(tool_calls=[call]), "messages")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([{"type": "text", "text": "12"}, {"type": "text", "text": " C"}], "12 C"),
        ([{"degrees": 12}], '[{"degrees": 12}]'),
        ({"degrees": None}, '{"degrees": null}'),
        (["a"], '["a"]'),
    ],
)
def test_result_of_parts_is_their_text_and_others_are_json(result, text):
    messages = [*EXCHANGE, {"role": "tool", "content": result}]
    assert messages_of({"messages": messages}, "messages")[-1]["content"] == text


@pytest.mark.parametrize("key", ["output", "tool_result", "tool_responses", "response"])
def test_result_under_another_key_is_the_content(key):
    result = {"role": "tool", key: [{"name": "f", "response": "12"}]}
    messages = messages_of({"messages": [*EXCHANGE, result, EXCHANGE[1]]}, "messages")
    assert messages[2] == {"role": "tool", "content": '[{"name": "f", "response": "12"}]'}
    empty = {"role": "tool", "content": "", "value": None, key: "12"}
    assert messages_of({"messages": [*EXCHANGE, empty]}, "messages")[2]["content"] == "12"
    with pytest.raises(RowError, match=f"text that nothing reads: message 3 .*leave_out: .{key}."):
        sample({"messages": [*EXCHANGE, {**result, "content": "12"}]}, "messages")


def test_null_fields_are_taken_out_of_tools_and_messages():
    tool = {"type": "function", "x": None, "function": {**TOOL["function"], "strict": None}}
    spoken = {**EXCHANGE[1], "extra": {"a": None, "b": 1}}
    value = {"messages": [EXCHANGE[0], spoken], "tools": [tool]}
    assert sample(value, "messages").tools == [TOOL]
    assert messages_of(value, "messages")[1]["extra"] == {"b": 1}


@pytest.mark.parametrize(
    "tools",
    [
     [TOOL], [TOOL["function"]], json.dumps([TOOL]), [json.dumps(TOOL)],
     [{"function": {"name": "f", "parameters": '{"type": "object"}'}}], TOOL,
     [{"type": "function", **TOOL["function"]}],
     [{"name": "f", "input_schema": {"type": "object"}}],
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
def test_all_spellings_of_tools_mean_the_same(tools, format):
    value = {**ROWS[format], "tools": tools}
    assert sample(value, format).tools == [TOOL]


BROKEN = {
    "date": (datetime(2024, 7, 26), "no JSON: "),
    "decimal": (Decimal("1.5"), "no JSON: "),
    "bytes": (b"x", "no JSON: "),
    "not a number": (math.nan, "no JSON: "),
    "surrogate": ("\ud800", "invalid Unicode: "),
}
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "call": lambda v: turn(tool_calls=[{"name": "f", "arguments": {"at": v}}]),
    "id": lambda v: turn(tool_calls=[{"id": [v], "name": "f", "arguments": {}}]),
    "tool": lambda v: {"messages": EXCHANGE, "tools": [{"name": "f", "default": v}]},
    "result": lambda v: {"messages": [*EXCHANGE, {"role": "tool", "content": {"at": v}}]},
    "argument": lambda v: {"messages": EXCHANGE, "chat_template_kwargs": {"at": v}},
}


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("place", PLACES)
def test_value_that_json_cannot_hold_is_a_reason_to_drop_the_row(place, value):
    broken, reason = BROKEN[value]
    with pytest.raises(RowError, match=f"^{reason}"):
        sample(PLACES[place](broken), "messages")


def test_json_text_of_arguments_is_checked_once_it_is_decoded():
    call = {"name": "f", "arguments": '{"x": "\\ud800"}'}
    with pytest.raises(RowError, match="invalid Unicode: a call in message 2"):
        sample(turn(tool_calls=[call]), "messages")


def talk_with_ids(first, second, *results):
    calls = [{"type": "function", "function": FUNCTION} for _ in range(2)]
    for call, number in zip(calls, (first, second), strict=True):
        call |= {} if number is None else {"id": number}
    answers = [{"role": "tool", "content": "r"} for _ in results]
    for answer, number in zip(answers, results, strict=True):
        answer |= {} if number is None else {"tool_call_id": number}
    return [EXCHANGE[0], {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


@pytest.mark.parametrize(
    ("given", "calls", "results"),
    [
        (("call_long_1", "call_long_2", "call_long_2", "call_long_1"), (0, 1), (1, 0)),
        ((None, None, None, None), (0, 1), (0, 1)),
        ((1, 2, 2, 1), (0, 1), (1, 0)),
        (("abcdefgh1", "call_long_2", None, "call_long_2"), ("abcdefgh1", 1), ("abcdefgh1", 1)),
    ],
)
def test_ids_are_made_of_nine_letters_and_results_follow_their_calls(given, calls, results):
    def named(numbers):
        return [n if isinstance(n, str) else f"call{n:05d}" for n in numbers]

    (_, turn, *answers) = with_short_ids(talk_with_ids(*given))
    assert [call["id"] for call in turn["tool_calls"]] == named(calls)
    assert [answer["tool_call_id"] for answer in answers] == named(results)


def test_template_that_wants_ids_of_nine_letters_gets_them(tokenizer):
    template = TOOL_TEMPLATE.replace(
        "{{ c.function.name",
        "{% if c.id | default('') | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ c.id ~ c.function.name",
    )
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    assert trained(tokenizer, encoded)[0].startswith("call00000weather")

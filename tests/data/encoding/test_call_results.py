"""Results of parallel calls stand in the order of their calls; each call has one, or the row is
refused."""

from typing import Any

import pytest

from tests.support.rows import EXCHANGE, messages_of, sample
from workflow.lib.data.encoding.row_values import RowError

ASK = EXCHANGE[0]


def calls(*ids, names="fg"):
    named = zip(ids, names, strict=True)
    made = [({"id": i} if i else {}) | {"name": name, "arguments": {}} for i, name in named]
    return {"role": "assistant", "tool_calls": made}


def result(text, **more):
    return {"role": "tool", "content": text, **more}


def contents(*messages):
    talk = messages_of({"messages": [ASK, *messages, EXCHANGE[1]]}, "messages")
    return [message["content"] for message in talk if message["role"] == "tool"]


USE = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("x", "y")]
ITEMS = [
    {"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ("x", "y")
]
OUTPUTS = [{"type": "function_call_output", "call_id": i, "output": t} for i, t in ("yb", "xa")]


@pytest.mark.parametrize(
    "messages",
    [
        [calls("x", "y"), result("b", tool_call_id="y"), result("a", tool_call_id="x")],
        [calls(7, 8), result("b", tool_call_id="8"), result("a", tool_call_id=7)],
        [calls("x", "y"), result("b", id="y"), result("a", id="x")],
        [calls("x", "y"), result("b", call_id="y"), result("a", call_id="x")],
        [calls("x", "y"), result("b", toolCallId="y"), result("a", toolCallId="x")],
        [calls("x", "y"), result("b", request_id="y"), result("a", request_id="x")],
        [calls("x", "y"), result("b", name="g"), result("a", name="f")],
        [calls("x", "y"), result("b", tool_call_id="y"), result("a")],
        [calls(None, None), result("b", name="functions.g"), result("a", name="functions.f")],
        [calls(None, None), result("a"), result("b")],
        [calls(None, None), result("a", tool_call_id="1"), result("b", tool_call_id="2")],
        [calls("x", "x"), result("a", tool_call_id="x"), result("b", tool_call_id="x")],
        [{"role": "assistant", "content": USE},
         {"role": "user", "content": [
             {"type": "tool_result", "tool_use_id": "y", "content": "b"},
             {"type": "tool_result", "tool_use_id": "x", "content": "a"}]}],
        [*ITEMS, *OUTPUTS],
        [{"from": "function_call", "value": '{"id": "x", "name": "f", "arguments": {}}'},
         {"from": "function_call", "value": '{"id": "y", "name": "f", "arguments": {}}'},
         {"from": "observation", "value": "b", "tool_call_id": "y"},
         {"from": "observation", "value": "a", "tool_call_id": "x"}],
    ],
)  # fmt: skip
def test_results_stand_in_the_order_of_their_calls(messages):
    assert contents(*messages) == ["a", "b"]


def test_ids_are_of_one_turn():
    first, second = result("a", tool_call_id="x"), result("b", tool_call_id="x")
    turn = calls("x", names="f")
    assert contents(turn, first, EXCHANGE[1], ASK, turn, second) == ["a", "b"]


def test_one_message_may_hold_all_results():
    assert contents(calls(None, None), result(["a", "b"])) == ['["a", "b"]']
    assert contents(calls("x", "y", names="ff"), result("a, b", name="f")) == ["a, b"]


def test_calls_in_a_text_may_have_results():
    said = {"role": "assistant", "content": "<tool_call>f</tool_call>"}
    assert contents(said, result("a"), result("b")) == ["a", "b"]


def test_calls_at_the_end_need_no_result():
    for tail in ([], [result("a", tool_call_id="x")]):
        talk: Any = {"messages": [ASK, calls("x", "y"), *tail]}
        assert len(messages_of(talk, "messages")) == 2 + len(tail)


def test_results_in_the_completion_are_of_the_calls_in_the_prompt():
    results = [result("b", tool_call_id="y"), result("a", tool_call_id="x")]
    value = {"prompt": [ASK, calls("x", "y")], "completion": [*results, EXCHANGE[1]]}
    talk = messages_of(value, "prompt_completion")
    assert [message["content"] for message in talk[2:4]] == ["a", "b"]


ONE = calls("x", names="f")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ONE, result("a", tool_call_id="z")],
         "result without a call: message 3 .* is 'z', .* 'f' .'x'.; .*leave_out: .tool_call_id."),
        ([ONE, result("a", toolCallId="z")], "result without a call: .*_id is 'z', "),
        ([ONE, result("a", name="h")], "result without a call: .* name is 'h', .*out: .name."),
        ([ONE, result("a"), result("b")], "message 4 is a tool's, and no call before"),
        ([ONE, result("a", tool_call_id="x"), result("b", tool_call_id="x")], "result without a c"),
        ([result("a")], "result without a call: message 2"),
        ([EXCHANGE[1], result("a", tool_call_id="x")], "result without a call: message 3"),
        ([ONE, result("a"), EXCHANGE[1], ASK, EXCHANGE[1], result("b")], "result without a call"),
        ([calls("x", "y"), result("b", tool_call_id="y")], "call without a result: 'f' .'x'."),
        ([ONE, ASK], "call without a result: 'f' .'x'. has none before message 3"),
        ([{**ONE, "content": "I look."}], "call without a result"),
    ],
)  # fmt: skip
def test_result_or_call_without_the_other_is_refused(messages, reason):
    with pytest.raises(RowError, match=reason):
        sample({"messages": [ASK, *messages, EXCHANGE[1]]}, "messages")

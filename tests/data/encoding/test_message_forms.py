"""Messages of other forms: reasoning, calls and results stand where a template looks for them."""

from typing import Any

import pytest

from tests.support.rows import EXCHANGE, messages_of
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import to_judged
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.settings.data import DataColumns

ASK, ANSWER = EXCHANGE
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
CALL = {"name": "f", "arguments": '{"x": 1}'}
RESULT = {"role": "tool", "content": "r"}
THOUGHT = {"reasoning_content": "hm"}


def spoken(content, **more):
    return {"role": "assistant", "content": content, **more}


def messages(*talk, **options):
    keys = KeyAudit(**options)
    value = {"messages": [ASK, *talk]}
    made: Any = to_sample(value, format="messages", columns=DataColumns(), keys=keys)
    return made.messages[1:]


@pytest.mark.parametrize("talk", [
    [spoken("hm", channel="analysis"), spoken("a", channel="final")],
    [spoken([{"type": "text", "text": "hm"}], channel="Analysis "), spoken("a")],
    [spoken("a", reasoning_details=[{"type": "reasoning.text", "text": "hm", "index": 0}])],
    [spoken("a", reasoning="hm", reasoning_details=[{"type": "reasoning.text", "text": "hm"}])],
    [spoken("a", thinking_blocks=[{"type": "thinking", "thinking": "hm", "signature": "s="}])],
    [spoken("a", thought="hm")],
    [spoken("a", Thoughts=" <think>hm</think>")],
    [spoken("a", chainOfThought="hm")],
    [{"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "hm"}]},
     {"type": "message", "role": "assistant",
      "content": [{"type": "output_text", "text": "a", "annotations": []}]}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
     ANSWER],
    [{"role": "assistant", "reasoning_content": "hm"}, ANSWER],
    [spoken([{"text": "hm", "thought": True}, {"text": "a"}])],
    [spoken([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}])],
])  # fmt: skip
def test_reasoning_is_that_of_the_answer_behind_it(talk):
    (turn,) = messages(*talk, template_keys=["reasoning_content"])
    assert turn | ANSWER | THOUGHT == turn


@pytest.mark.parametrize("talk", [
    [spoken("hm", channel="analysis"),
     spoken('{"x": 1}', channel="commentary", recipient="functions.f", content_type="json"),
     {"role": "tool", "name": "functions.f", "channel": "commentary", "content": "r"}],
    [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
     {"type": "function_call", "id": "i", "call_id": "c", "status": "completed", **CALL},
     {"type": "function_call_output", "call_id": "c", "output": "r"}],
])  # fmt: skip
def test_reasoning_before_a_call_is_that_of_the_call(talk):
    turn, result = messages(*talk)
    (call,) = turn["tool_calls"]
    assert call | CALLS[0] == call
    assert turn["reasoning_content"] == "hm"
    assert result["content"] == "r"


@pytest.mark.parametrize("key", [
    *("tool_calls", "tool_call", "toolCalls", "function_call", "functionCall"),
    *("function_calls", "Tool-Calls", "toolUses"),
])  # fmt: skip
@pytest.mark.parametrize("calls", [CALLS, CALLS[0], CALL, [CALL]])
def test_calls_are_read_under_all_names(key, calls):
    assert messages({"role": "assistant", key: calls})[0]["tool_calls"] == CALLS


def test_keys_that_the_template_reads_stay():
    (turn,) = messages(spoken("a", thought="h m", tool_call="f g", channel="final"),
                       template_keys=["thought", "tool_call", "channel"])  # fmt: skip
    assert turn == spoken("a", thought="h m", tool_call="f g", channel="final")
    for key in ("reasoning", "thinking"):
        (turn,) = messages({**ANSWER, **THOUGHT}, template_keys=[key])
        assert turn == {**ANSWER, key: "hm"}
        value, keys = {"messages": EXCHANGE, "reasoning": "hm"}, KeyAudit(template_keys=[key])
        row: Any = to_sample(value, format="messages", columns=DataColumns(), keys=keys)
        assert row.messages[1] == turn


def test_channel_that_is_none_of_harmony_is_a_label():
    talk = [spoken("a", channel="general", recipient="Ann")]
    assert messages(*talk)[0]["content"] == "a"
    (turn, _) = messages(spoken("hm", channel="analysis"), ANSWER, leave_out=["channel"])
    assert turn["content"] == "hm"


@pytest.mark.parametrize(("talk", "reason"), [
    ([spoken("hm", channel="analysis")], "empty: content of message 2, a reasoning that no answer"),
    ([spoken("hm", channel="analysis"), ASK, ANSWER], "empty: content of message 2, a reasoning"),
    ([spoken("hm", channel="analysis"), spoken("a", reasoning="x")], "empty: content of message 2"),
    ([spoken("hm", channel="analysis", train=False), ANSWER], "empty: content of message 2"),
    ([spoken("a", reasoning="hm", thought="ah")], "two reasonings: message 2 has thought and"),
    ([spoken("a", function_calls="f of 1")], "calls as text: message 2 has 'f of .*; write a list"),
    ([spoken("a", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}])],
     "not text: reasoning_details of message 2 is list"),
    ([{**ASK, "thought": "hm"}, ANSWER], "not an assistant's: message 2 has thought, .*leave_out"),
    ([{**ASK, "tool_calls": CALLS}, ANSWER], "not an assistant's: message 2 has tool_calls, and"),
    ([spoken("a", prefix="Sure, ")], "unknown beginning: message 2 has prefix = 'Sure, '.*leave_o"),
    ([spoken("f(1)", channel="analysis", recipient="python"), ANSWER], "call of no function: "),
    ([spoken("f(1)", channel="commentary", recipient="browser.open")], "call of no function: "),
    ([spoken("Sure, ", prefix=True), spoken("a", **THOUGHT)], "two reasonings: a turn continues"),
    ([{"type": "web_search_call", "id": "w"}, ANSWER], "unknown item: .* type 'web_search_call'"),
    ([ANSWER, {"role": "tool", "output": "a", "response": "b"}], "two values: a tool's message"),
])  # fmt: skip
def test_message_that_would_lose_something_is_refused(talk, reason):
    with pytest.raises(RowError, match=reason):
        messages(*talk)


@pytest.mark.parametrize("value", [
    "Any tree will do.", "f(x)", "日本", ["easy"], [{"a": "b"}], {"name": "f", "arguments": {}},
    {"a": [{"b": "c"}]},
])  # fmt: skip
@pytest.mark.parametrize("message", [ASK, ANSWER])
def test_text_under_a_key_that_nothing_reads_is_refused(message, value):
    talk = [{**message, "note": value}, ANSWER]
    with pytest.raises(RowError, match=r"text that nothing reads: message 2 .*leave_out: \[note\]"):
        messages(*talk)
    with pytest.raises(RowError, match=r"message 2 has note = .*leave_out: \[note, other\]"):
        messages({**talk[0], "other": "a text"}, ANSWER)
    assert messages(*talk, leave_out=["note"])[0]["content"] == message["content"]
    assert messages(*talk, template_keys=["note"])[0]["note"] == value


@pytest.mark.parametrize("value", [
    "gpt-4", 3, True, None, "", "2026-11-28 14:01:02", "1f0c/a+b==", "https://a.example/b?c=1",
    {"score": 1, "ok": [True]}, [], {"a": None}, [1, 2],
])  # fmt: skip
def test_label_of_a_message_is_no_text(value):
    assert messages({**ANSWER, "note": value})[0]["content"] == "a"


@pytest.mark.parametrize("key", ["prefix", "partial"])
def test_beginning_of_a_turn_is_one_with_its_continuation(key):
    talk = [spoken("Sure, ", **{key: True}), spoken("an oak.")]
    made: Any = to_sample({"messages": [ASK, *talk]}, format="messages", columns=DataColumns())
    assert made.messages == [ASK, spoken("Sure, an oak.")]
    assert (made.trained, made.prefills) == ([False, True], {1: "Sure, "})
    assert messages(spoken("a", **{key: False})) == [ANSWER]
    (turn,) = messages({**talk[0], **THOUGHT}, talk[1])
    assert turn == spoken("Sure, an oak.", **THOUGHT)
    for alone in (talk[:1], [talk[0], ASK, ANSWER]):
        with pytest.raises(RowError, match="unfinished turn: message 2 is the beginning of a turn"):
            messages(*alone)


def test_prompt_that_ends_with_the_assistant_s_beginning_is_one_turn_with_the_completion():
    value = {"system": "s", "prompt": [ASK, spoken("Sure, ")], "completion": "an oak."}
    made: Any = to_sample(value, format="prompt_completion", columns=DataColumns())
    assert made.messages[2:] == [spoken("Sure, an oak.")]
    assert made.prefills == {2: "Sure, "}
    pair = {"prompt": value["prompt"], "chosen": "an oak.", "rejected": [spoken("a stone.")]}
    for rated in (False, True):
        judged = to_judged(
            pair, format="pairs", columns=DataColumns(), keys=KeyAudit(), rated=rated
        )
        assert [answer.prefills for answer in judged.answers] == [{1: "Sure, "}] * 2
        assert [answer.trained for answer in judged.answers] == [[False, True]] * 2
        assert judged.answers[1].messages == [ASK, spoken("Sure, a stone.")]
    value = {"prompt": EXCHANGE, "completion": EXCHANGE}
    assert messages_of(value, "prompt_completion") == [*EXCHANGE, *EXCHANGE]

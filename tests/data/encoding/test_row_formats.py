"""Rows of four formats become conversations or texts, or are refused with a reason."""

import json

import pytest

from tests.support.rows import EXCHANGE, ROWS, TOOL, messages_of, sample, turn
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.settings.data import DataColumns


@pytest.mark.parametrize(
    ("value", "format", "columns"),
    [
        ({"prompt": "q", "completion": "a"}, "prompt_completion", {}),
        ({"p": "q", "c": "a"}, "prompt_completion", {"prompt": "p", "completion": "c"}),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", {}),
        ({"instruction": "q", "input": None, "output": "a"}, "alpaca", {}),
        ({"messages": EXCHANGE}, "messages", {}),
        (
            {"m": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "messages",
            {"messages": "m"},
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "messages",
            {"messages": "conversations"},
        ),
        ({"messages": json.dumps(EXCHANGE)}, "messages", {}),
        ({"messages": EXCHANGE, "prompt": "q"}, "messages", {}),
        (
            {"prompt": json.dumps(EXCHANGE[:1]), "completion": json.dumps(EXCHANGE[1:])},
            "prompt_completion",
            {},
        ),
        ({"prompt": EXCHANGE[:1], "completion": EXCHANGE[1:]}, "prompt_completion", {}),
        ({"prompt": EXCHANGE[:1], "completion": "a"}, "prompt_completion", {}),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    EXCHANGE[1],
                ]
            },
            "messages",
            {},
        ),
        (
            {
                "messages": [
                    {"role": None, "from": "human", "content": None, "value": "q"},
                    {"role": "assistant", "from": None, "content": "a", "tool_calls": None},
                ]
            },
            "messages",
            {},
        ),
    ],
)
def test_every_format_gives_the_same_conversation(value, format, columns):
    assert messages_of(value, format, **columns) == EXCHANGE


def test_alpaca_input_follows_the_instruction_after_a_blank_line():
    value = {"instruction": "add", "input": "1 2", "output": "3"}
    assert messages_of(value, "alpaca")[0]["content"] == "add\n\n1 2"


@pytest.mark.parametrize(
    ("value", "format", "reason"),
    [
        ({"prompt": "q"}, "prompt_completion", "missing column: 'completion'"),
        ({"prompt": "q", "completion": " \n"}, "prompt_completion", "empty: column 'completion'"),
        ({"prompt": 7, "completion": "a"}, "prompt_completion", "not text: column 'prompt' is int"),
        ({"prompt": "q"}, "messages", "missing column: 'messages'"),
        ({"messages": None}, "messages", "not a list of messages: column 'messages' is null"),
        ({"text": None}, "text", "not text: column 'text' is null"),
        ({"text": "a\ud800"}, "text", "invalid Unicode: column 'text' holds a lone surrogate"),
        (
            {"instruction": "q", "input": 1, "output": "a"},
            "alpaca",
            "not text: column 'input' is int",
        ),
        ({"messages": "hi"}, "messages", "broken JSON: column 'messages': Expecting value"),
        ({"messages": []}, "messages", "no assistant turn"),
        ({"messages": ["hi"]}, "messages", "not a message: message 1 is str"),
        (turn(role="user"), "messages", "no assistant turn"),
        (
            {"prompt": "q", "completion": str(EXCHANGE[1:])},
            "prompt_completion",
            "broken JSON: column 'completion' holds text of messages that is no JSON",
        ),
        (
            {"prompt": "[{'role': 'user' 'content': 'q'}\n {'x': 1}]", "completion": "a"},
            "prompt_completion",
            "broken JSON: column 'prompt' holds text of messages that is no JSON",
        ),
        (turn(role="boss"), "messages", "unknown role: message 2 has 'boss'"),
        (turn(role=["a"]), "messages", "unknown role: message 2 has ['a']"),
        (turn(content=""), "messages", "empty: content of message 2"),
        (turn(content=[{"type": "text"}]), "messages", "not text: content of message 2 is null"),
        (turn(content=[{"type": []}]), "messages", "not text: content of message 2 is null"),
        (turn(content=[{"type": ["x"]}]), "messages", "not text: content of message 2 has a part"),
        (turn("tool", [{"type": ["x"]}]), "messages", "no assistant turn"),
        (
            turn(content=[{"type": "image_url"}]),
            "messages",
            "not text: content of message 2 has a part of type 'image_url'",
        ),
        (turn(tool_calls=[{"id": 1}]), "messages", "broken tool call: message 2 has one without"),
        (turn(tool_calls=[{"name": " "}]), "messages", "broken tool call: message 2 has one with"),
        (
            turn(tool_calls=[{"function": {"name": "f", "arguments": "{broken"}}]),
            "messages",
            "broken JSON: arguments in message 2",
        ),
        (
            turn(tool_calls=[{"function": {"name": "f", "arguments": "[]"}}]),
            "messages",
            "broken tool call: arguments in message 2 are list",
        ),
        ({"messages": EXCHANGE, "tools": [{}]}, "messages", "not a tool: column 'tools'"),
        ({"messages": EXCHANGE, "tools": 3}, "messages", "not a list of tools: column 'tools'"),
        ({"messages": "[" * 70 + "]" * 70}, "messages", "nested too deeply: column 'messages'"),
        (turn(weight=0), "messages", "no trained token: "),
        (turn(weight=-0.5), "messages", "unknown weight: message 2 has weight = -0.5"),
        (turn(name="a\ud800"), "messages", "invalid Unicode: message 2"),
        ({"input_ids": [1, 2.0], "labels": [1, 2]}, "tokens", "not a list of whole numbers"),
        ({"input_ids": [1, True], "labels": [1, 2]}, "tokens", "not a list of whole numbers"),
        ({"input_ids": [], "labels": []}, "tokens", "empty: column 'input_ids'"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens", "unequal lengths: 2 token ids, 1 in"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "tokens", "labels differ from tokens"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "tokens", "not a list of 0 and 1"),
        ({"labels": [1]}, "tokens", "missing column: 'input_ids'"),
    ],
)
def test_unusable_row_has_a_reason(value, format, reason):
    with pytest.raises(RowError) as caught:
        sample(value, format)
    assert str(caught.value).startswith(reason)


def test_completion_alone_is_trained_whatever_the_prompt_says():
    value = {"prompt": [*EXCHANGE, EXCHANGE[0]], "completion": EXCHANGE[1:]}
    assert sample(value, "prompt_completion").trained == [False, False, False, True]


def test_other_keys_of_a_message_go_to_the_template():
    spoken = {**EXCHANGE[1], "reasoning_content": "hm", "name": None}
    messages = messages_of({"messages": [EXCHANGE[0], spoken]}, "messages")
    assert messages[1] == {**EXCHANGE[1], "reasoning_content": "hm"}


SYSTEM = {"role": "system", "content": "s"}
BEFORE = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize(
    "columns", [{"system": "s"}, {"system_prompt": "s", "system": None}, {"system_message": "s"}]
)
def test_system_text_of_a_column_is_the_first_message(format, columns):
    assert messages_of({**ROWS[format], **columns}, format) == [SYSTEM, *EXCHANGE]


@pytest.mark.parametrize("format", ["prompt_completion", "alpaca"])
@pytest.mark.parametrize("history", [[["q0", "a0"]], BEFORE, json.dumps([["q0", "a0"]])])
def test_history_stands_before_the_prompt(format, history):
    assert messages_of({**ROWS[format], "history": history}, format) == [*BEFORE, *EXCHANGE]


@pytest.mark.parametrize(
    ("format", "trained"),
    [("alpaca", [False, True, False, True]), ("prompt_completion", [False, False, False, True])],
)
def test_history_is_trained_as_the_format_says(format, trained):
    assert sample({**ROWS[format], "history": BEFORE}, format).trained == trained


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"system": "s", "system_prompt": "t"}, "two columns for one system text: 'system' and"),
        ({"tools": [1], "functions": [2]}, "two columns for one list of tools: 'tools' and"),
        ({"messages": [SYSTEM, *EXCHANGE], "system": "t"}, "two system texts: "),
        ({"prompt": "another"}, "prompt beside messages: column 'prompt' holds a text that is in"),
        ({"history": [["q", "a"]]}, "history beside messages: column 'history' has no place in"),
        ({"reasoning": ["step"]}, "not text: column 'reasoning' is list"),
        (
            {
                "messages": [EXCHANGE[0], {**EXCHANGE[1], "content": "<think>a</think>b"}],
                "cot": "c",
            },
            "two reasonings: column 'cot' has one",
        ),
        (
            {"messages": [{**EXCHANGE[0], "tools": [TOOL]}, EXCHANGE[1]]},
            "list of tools in a message: ",
        ),
        ({"messages": [{**EXCHANGE[0], "system": "s"}, EXCHANGE[1]]}, "system text in a message: "),
        ({"enable_thinking": "yes"}, "not bool: column 'enable_thinking' is str"),
        ({"chat_template_kwargs": "[]x"}, "broken JSON: column 'chat_template_kwargs'"),
        ({"chat_template_kwargs": [1]}, "not an object: column 'chat_template_kwargs' is list"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(columns, reason):
    with pytest.raises(RowError) as caught:
        sample({"messages": EXCHANGE, **columns}, "messages")
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("name", ["system", "history", "tools", "chat_template_kwargs"])
def test_text_has_no_place_for_columns_of_conversations(name):
    with pytest.raises(RowError, match=rf"^{name} beside text: .* \(data.leave_out: \[{name}\]\)"):
        sample({"text": "a", name: "x"}, "text")


def test_thinking_is_a_switch_or_a_text():
    switched = sample({"messages": EXCHANGE, "thinking": False}, "messages")
    spoken = sample({"messages": EXCHANGE, "thinking": "hm"}, "messages")
    assert (switched.messages, switched.template_kwargs) == (EXCHANGE, {"thinking": False})
    assert spoken.messages[1]["reasoning_content"] == "hm"
    assert spoken.template_kwargs == {}


@pytest.mark.parametrize("format", ROWS)
def test_reasoning_of_a_column_is_that_of_the_answer(format):
    answer = {**EXCHANGE[1], "reasoning_content": "hm"}
    for name in ("reasoning", "thought", "cot", "chain_of_thought"):
        assert messages_of({**ROWS[format], name: "hm"}, format) == [EXCHANGE[0], answer]


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize(
    "columns",
    [
        {"enable_thinking": False, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low", "x": None}},
        {"chat_template_kwargs": '{"enable_thinking": false}', "reasoning_effort": "low"},
    ],
)
def test_arguments_of_the_template_go_with_the_row(format, columns):
    kwargs = sample({**ROWS[format], **columns}, format).template_kwargs
    assert kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    "messages",
    [
        {"role": ["user", "assistant"], "content": ["q", "a"]},
        [{"input": "q", "output": "a"}],
        [["q", "a"]],
        [{"role": "prompter", "text": "q"}, {"role": "assistant", "text": "a"}],
        [{"from": "Human", "value": "q"}, {"from": "Assistant ", "value": "a"}],
        [["user", "q"], ["assistant", "a"]],
        [["HUMAN", "q"], ["ASSISTANT", "a"]],
        "\n\nHuman: q\n\nAssistant: a",
    ],
)
def test_other_shapes_of_a_conversation_mean_the_same(messages):
    assert messages_of({"messages": messages}, "messages") == EXCHANGE


def test_system_text_of_a_pair_stands_before_it_once():
    def talk(*systems):
        return [{"system": s, "input": "q", "output": "a"} for s in systems]

    system = [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}]
    for systems, messages in [
        (("s", "s"), [system[0], *EXCHANGE, *EXCHANGE]),
        (("s", ""), [system[0], *EXCHANGE, *EXCHANGE]),
        (("", "s", "t"), [*EXCHANGE, system[0], *EXCHANGE, system[1], *EXCHANGE]),
    ]:
        assert messages_of({"messages": talk(*systems)}, "messages") == messages
    keys = KeyAudit(leave_out=["system"])
    value = {"messages": talk("s")}
    left = to_sample(value, format="messages", columns=DataColumns(), keys=keys)
    assert isinstance(left, Conversation)
    assert left.messages == EXCHANGE
    assert keys.report()[1] == {"system (message)": 1}


def test_pairs_of_which_one_is_no_role_are_questions_and_answers():
    pairs = [["user", "assistant"], ["q", "a"]]
    texts = [m["content"] for m in messages_of({"messages": pairs}, "messages")]
    assert texts == ["user", "assistant", "q", "a"]


def test_transcript_that_ends_with_a_question_is_turns_and_its_answer_has_no_blank_before_it():
    prompt = "\n\nHuman: q\n\nAssistant: a\n\nHuman: q\n\nAssistant:"
    conversation = sample({"prompt": prompt, "completion": " a"}, "prompt_completion")
    assert conversation.messages == [*EXCHANGE, *EXCHANGE]
    assert conversation.trained == [False, False, False, True]
    texts = [prompt + " a\n\nTrue?", "Human: alone", "Assistant: a"]
    for text in texts:
        value = {"prompt": text, "completion": " a"}
        assert [m["content"] for m in messages_of(value, "prompt_completion")] == [text, " a"]


@pytest.mark.parametrize(
    "text", ["3", '"q"', '{"a": 1}', '["x"]', "[1, 2", '[{"a": 1}]', "[{'content': 1}]"]
)
def test_text_that_happens_to_be_json_stays_text(text):
    value = {"prompt": text, "completion": text}
    assert [m["content"] for m in messages_of(value, "prompt_completion")] == [text, text]


def test_json_text_of_calls_is_calls_where_there_are_tools():
    text = '[{"name": "f", "arguments": {"x": null}}]'
    value = {"prompt": "q", "completion": text}
    assert messages_of(value, "prompt_completion")[1]["content"] == text
    (_, turn) = messages_of({**value, "tools": [TOOL]}, "prompt_completion")
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": None}}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_a_message_is_text_or_parts_of_it(key):
    parts = [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]
    assert messages_of(turn(**{key: parts}), "messages")[1][key] == "I look."
    assert not messages_of(turn(**{key: True}), "messages")[1][key]
    for other in ({"content": "I look."}, ["I look."], 5):
        with pytest.raises(RowError, match=f"not text: {key} of message 2 is .*leave_out"):
            sample(turn(**{key: other}), "messages")


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>", "hm</think>", " <think>hm"])
def test_tags_around_a_reasoning_are_the_template_s(text):
    assert messages_of(turn(reasoning_content=text), "messages")[1]["reasoning_content"] == "hm"
    value = {"prompt": "q", "completion": "a", "reasoning": text}
    assert messages_of(value, "prompt_completion")[1]["reasoning_content"] == "hm"
    assert messages_of(turn(thinking=" hm "), "messages")[1]["thinking"] == " hm "


def test_turn_has_one_reasoning_and_its_end():
    content = "<think>hm</think>a"
    both = messages_of(turn(content=content, reasoning="<think>hm</think>"), "messages")
    assert both == messages_of(turn(content=content), "messages")
    with pytest.raises(RowError, match="two reasonings: message 2 has thinking, and its content"):
        sample(turn(content=content, thinking="other"), "messages")
    with pytest.raises(RowError, match="unfinished reasoning: content of message 2 begins with"):
        sample(turn(content="<think>hm"), "messages")
    cut = {**turn(content="<think>hm", train=False)["messages"][1]}
    assert sample({"messages": [EXCHANGE[0], cut, *EXCHANGE]}, "messages")


def test_reason_of_a_rejection_cannot_speak_to_the_terminal():
    with pytest.raises(RowError) as caught:
        sample(turn(role="\x1b[2J\u202e"), "messages")
    assert str(caught.value).isprintable()

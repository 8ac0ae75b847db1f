"""Rows of four formats become conversations or texts, or are refused with a reason."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow.lib.data.encoding.chat_messages import Conversation, RowError
from workflow.lib.data.encoding.row_formats import REQUIRED, TokenRow, choose_format, to_sample
from workflow.lib.settings.data import DataColumns
from workflow.lib.system.errors import UserError

EXCHANGE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def sample(value: dict[str, Any], format: Any, **columns: str) -> Any:
    return to_sample(value, format=format, columns=DataColumns(**columns))


def messages_of(value: dict[str, Any], format: Any, **columns: str) -> list[Any]:
    conversation = sample(value, format, **columns)
    assert isinstance(conversation, Conversation)
    return conversation.messages


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (["messages", "text"], "messages"),
        (["id", "prompt", "completion"], "prompt_completion"),
        (["instruction", "output"], "alpaca"),
        (["text", "prompt"], "text"),
        (["conversations", "id"], "messages"),
        (["text", "input_ids", "labels"], "tokens"),
        (["input_ids", "loss_mask"], "tokens"),
        (["text", "input_ids", "attention_mask"], "text"),
    ],
)
def test_auto_takes_the_format_whose_columns_are_there(columns: list[str], format: str) -> None:
    chosen = choose_format(columns, format="auto", columns=DataColumns(), setting="data.train")
    assert chosen == format


def test_missing_columns_lists_found_and_expected_and_the_key() -> None:
    names = DataColumns(prompt="question")
    with pytest.raises(UserError) as caught:
        choose_format(["q", "a"], format="prompt_completion", columns=names, setting="data.train")
    text = str(caught.value)
    assert "data.format = 'prompt_completion': data.train has the columns 'q', 'a'" in text
    assert "prompt_completion (question, completion)" in text
    assert "data.columns" in text


def test_misspelt_column_is_named_with_the_nearest_one() -> None:
    names = DataColumns(prompt="Question text", completion="Reply", text="body")
    with pytest.raises(UserError) as caught:
        choose_format(
            ["ID", "Question Text", "Answer "], format="auto", columns=names, setting="data.train"
        )
    text = str(caught.value)
    assert "the columns 'ID', 'Question Text', 'Answer '," in text
    assert (
        "data.columns.prompt = 'Question text' is none of them; did you mean 'Question Text'?"
        in text
    )
    assert "data.columns.completion = 'Reply' is none of them. " in text
    assert "data.columns.messages" not in text


def test_token_ids_without_targets_are_told_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"tokens \(input_ids with labels or loss_mask\)"):
        choose_format(["input_ids"], format="auto", columns=DataColumns(), setting="data.train")


def test_column_names_cannot_speak_to_the_terminal() -> None:
    with pytest.raises(UserError) as caught:
        choose_format(["\x1b[2J"], format="auto", columns=DataColumns(), setting="data.train")
    assert r"\x1b[2J" in str(caught.value)


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
            {},
        ),
        ({"messages": json.dumps(EXCHANGE)}, "messages", {}),
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
def test_every_format_gives_the_same_conversation(
    value: dict[str, Any], format: str, columns: dict[str, str]
) -> None:
    assert messages_of(value, format, **columns) == EXCHANGE


def test_alpaca_input_follows_the_instruction_after_a_blank_line() -> None:
    value = {"instruction": "add", "input": "1 2", "output": "3"}
    assert messages_of(value, "alpaca")[0]["content"] == "add\n\n1 2"


def test_text_stays_as_it_is() -> None:
    assert sample({"text": " two\nlines "}, "text") == " two\nlines "


def test_empty_system_message_is_allowed() -> None:
    messages = [{"role": "system", "content": ""}, *EXCHANGE]
    assert messages_of({"messages": messages}, "messages") == messages


def turn(role: Any = "assistant", content: Any = "a", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "q"}, {"role": role, "content": content, **more}]
    }


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
        (turn(role="boss"), "messages", "unknown role: message 2 has 'boss'"),
        (turn(role=["a"]), "messages", "unknown role: message 2 has ['a']"),
        (turn(content=""), "messages", "empty: content of message 2"),
        (turn(content=[{"type": "text"}]), "messages", "not text: content of message 2 is null"),
        (
            turn(content=[{"type": "image_url"}]),
            "messages",
            "not text: content of message 2 has a part of type 'image_url'",
        ),
        (turn(tool_calls=[{"id": 1}]), "messages", "broken tool call: message 2 has one without"),
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
        (turn(weight=0.5), "messages", "unknown weight: message 2 has 0.5"),
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
def test_unusable_row_has_a_reason(value: dict[str, Any], format: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        sample(value, format)
    assert str(caught.value).startswith(reason)


def test_completion_alone_is_trained_whatever_the_prompt_says() -> None:
    value = {"prompt": [*EXCHANGE, EXCHANGE[0]], "completion": EXCHANGE[1:]}
    assert sample(value, "prompt_completion").trained == [False, False, False, True]


def test_weight_zero_keeps_a_turn_out_of_the_loss() -> None:
    messages = [
        EXCHANGE[0],
        {**EXCHANGE[1], "weight": 0},
        EXCHANGE[0],
        {**EXCHANGE[1], "weight": 1},
    ]
    conversation = sample({"messages": messages}, "messages")
    assert conversation.trained == [False, False, False, True]
    assert conversation.messages == [*EXCHANGE, *EXCHANGE]


def test_other_keys_of_a_message_go_to_the_template() -> None:
    spoken = {**EXCHANGE[1], "reasoning_content": "hm", "name": None}
    messages = messages_of({"messages": [EXCHANGE[0], spoken]}, "messages")
    assert messages[1] == {**EXCHANGE[1], "reasoning_content": "hm"}


FUNCTION = {"name": "f", "arguments": {"x": None}}
CALLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "tool_calls": [FUNCTION]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": null}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": null}}'},
    ],
)
def test_all_spellings_of_a_call_mean_the_same(turn: dict[str, Any]) -> None:
    messages = messages_of({"messages": [EXCHANGE[0], turn]}, "messages")
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("role", "result"), [("tool", ""), ("function", "1"), ("observation", "1")]
)
def test_result_of_a_tool_is_a_message_that_may_be_empty(role: str, result: str) -> None:
    messages = [*EXCHANGE, {"role": role, "content": result, "tool_call_id": "7"}]
    (*_, last) = messages_of({"messages": messages}, "messages")
    assert last == {"role": "tool", "content": result, "tool_call_id": "7"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "tools",
    [[TOOL], [TOOL["function"]], json.dumps([TOOL]), [json.dumps(TOOL)],
     [{"function": {"name": "f", "parameters": '{"type": "object"}'}}]],
)  # fmt: skip
@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
def test_all_spellings_of_tools_mean_the_same(tools: Any, format: str) -> None:
    value = {"messages": EXCHANGE, "prompt": "q", "completion": "a", "tools": tools}
    assert sample(value, format).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools: Any) -> None:
    assert sample({"messages": EXCHANGE, "tools": tools}, "messages").tools is None


@pytest.mark.parametrize(
    "targets",
    [{"labels": [-100, 2, 3]}, {"loss_mask": [0, 1, 1]}, {"loss_mask": [False, True, True]}],
)
def test_labels_and_masks_mean_the_same(targets: dict[str, Any]) -> None:
    row = TokenRow([1, 2, 3], [False, True, True])
    assert sample({"input_ids": [1, 2, 3], **targets}, "tokens") == row


def test_padding_of_ready_tokens_is_left_out() -> None:
    value = {
        "input_ids": [0, 1, 2, 0],
        "labels": [-100, 1, 2, -100],
        "attention_mask": [0, 1, 1, 0],
    }
    assert sample(value, "tokens") == TokenRow([1, 2], [True, True])


def test_tokens_without_targets_say_nothing_of_training() -> None:
    assert sample({"input_ids": [1, 2]}, "tokens") == TokenRow([1, 2], None)


KEYS = [
    "messages",
    "prompt",
    "completion",
    "text",
    "tools",
    "input_ids",
    "labels",
    "loss_mask",
    "attention_mask",
    "role",
    "from",
    "content",
    "value",
    "weight",
    "tool_calls",
    "function_call",
    "function",
    "name",
    "arguments",
]
WORDS = [
    "user",
    "assistant",
    "tool",
    "gpt",
    "function_call",
    "f",
    "",
    "{}",
    "[]",
    '{"name": "f"}',
    "\ud800",
    "\x1b",
]
SCALARS = st.sampled_from([None, True, 0, 1, -100, 10**30, 0.5, float("nan"), *WORDS])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), st.sampled_from(list(REQUIRED)))
def test_no_row_fails_otherwise_than_by_a_row_error(value: dict[str, Any], format: Any) -> None:
    with contextlib.suppress(RowError):
        assert isinstance(sample(value, format), Conversation | TokenRow | str)


def test_reason_of_a_rejection_cannot_speak_to_the_terminal() -> None:
    with pytest.raises(RowError) as caught:
        sample(turn(role="\x1b[2J\u202e"), "messages")
    assert str(caught.value).isprintable()

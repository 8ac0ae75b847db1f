"""Rows of four formats become conversations or texts, or are refused with a reason."""

from typing import Any

import pytest

from workflow.lib.data_config import DataColumns
from workflow.lib.errors import UserError
from workflow.lib.samples import RowError, choose_format, to_sample

EXCHANGE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def sample(value: dict[str, Any], format: Any, **columns: str) -> Any:
    return to_sample(value, format=format, columns=DataColumns(**columns))


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (["messages", "text"], "messages"),
        (["id", "prompt", "completion"], "prompt_completion"),
        (["instruction", "output"], "alpaca"),
        (["text", "prompt"], "text"),
    ],
)
def test_auto_takes_the_format_whose_columns_are_there(columns: list[str], format: str) -> None:
    found = choose_format(columns, format="auto", columns=DataColumns(), setting="data.train")
    assert found == format


def test_missing_columns_lists_found_and_expected_and_the_key() -> None:
    names = DataColumns(prompt="question")
    with pytest.raises(UserError) as caught:
        choose_format(["q", "a"], format="prompt_completion", columns=names, setting="data.train")
    text = str(caught.value)
    assert "data.format = 'prompt_completion': data.train has the columns q, a" in text
    assert "prompt_completion (question, completion)" in text
    assert "data.columns" in text


def test_sharegpt_column_gets_its_setting_named() -> None:
    with pytest.raises(UserError, match=r"data\.columns\.messages: conversations"):
        choose_format(["conversations"], format="auto", columns=DataColumns(), setting="data.train")


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
    assert sample(value, format, **columns) == EXCHANGE


def test_alpaca_input_follows_the_instruction_after_a_blank_line() -> None:
    value = {"instruction": "add", "input": "1 2", "output": "3"}
    assert sample(value, "alpaca")[0]["content"] == "add\n\n1 2"


def test_text_stays_as_it_is() -> None:
    assert sample({"text": " two\nlines "}, "text") == " two\nlines "


def test_empty_system_message_is_allowed() -> None:
    messages = [{"role": "system", "content": ""}, *EXCHANGE]
    assert sample({"messages": messages}, "messages") == messages


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
        ({"text": None}, "text", "not text: column 'text' is null"),
        ({"text": "a\ud800"}, "text", "invalid Unicode: column 'text' holds a lone surrogate"),
        (
            {"instruction": "q", "input": 1, "output": "a"},
            "alpaca",
            "not text: column 'input' is int",
        ),
        ({"messages": "hi"}, "messages", "not a list of messages: column 'messages' is str"),
        ({"messages": []}, "messages", "no assistant turn"),
        ({"messages": ["hi"]}, "messages", "not a message: message 1 is str"),
        (turn(role="user"), "messages", "no assistant turn"),
        (turn(role="tool"), "messages", "unknown role: message 2 has 'tool'"),
        (turn(role=["a"]), "messages", "unknown role: message 2 has ['a']"),
        (turn(content=""), "messages", "empty: content of message 2"),
        (turn(content=[{"type": "text"}]), "messages", "not text: content of message 2 is list"),
        (turn(tool_calls=[{"id": 1}]), "messages", "unsupported key: message 2 has 'tool_calls'"),
        (turn(weight=0), "messages", "unsupported key: message 2 has 'weight'"),
    ],
)
def test_unusable_row_has_a_reason(value: dict[str, Any], format: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        sample(value, format)
    assert str(caught.value).startswith(reason)

"""The columns of a source decide what its rows are, or are refused with what to set."""

import re

import pytest

from workflow.lib.data.encoding.row_columns import choose_format
from workflow.lib.settings.data import DataColumns
from workflow.lib.system.errors import UserError


def choose(present, *, format="auto", examples="texts", **names):
    return choose_format(
        present,
        format=format,
        columns=DataColumns(**names),
        setting="data.train",
        examples=examples,
    )


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
def test_auto_takes_the_format_whose_columns_are_there(columns, format):
    assert choose(columns)[0] == format


def test_missing_columns_lists_found_and_expected_and_the_key():
    with pytest.raises(UserError) as caught:
        choose(["q", "a"], format="prompt_completion", prompt="question")
    text = str(caught.value)
    assert "data.format = 'prompt_completion': data.train has the columns 'q', 'a'" in text
    assert "prompt_completion (question, completion)" in text
    assert "data.columns" in text


def test_misspelt_column_is_named_with_the_nearest_one():
    names = {"prompt": "Question text", "completion": "Reply", "text": "body"}
    with pytest.raises(UserError) as caught:
        choose(["ID", "Question Text", "Answer "], **names)
    text = str(caught.value)
    assert "the columns 'ID', 'Question Text', 'Answer '," in text
    assert (
        "data.columns.prompt = 'Question text' is none of them; did you mean 'Question Text'?"
        in text
    )
    assert "data.columns.completion = 'Reply' is none of them. " in text
    assert "data.columns.messages" not in text


def test_column_names_cannot_speak_to_the_terminal():
    with pytest.raises(UserError) as caught:
        choose(["\x1b[2J"])
    assert r"\x1b[2J" in str(caught.value)


def test_names_that_the_user_chose_are_not_replaced():
    with pytest.raises(UserError, match=r"data\.columns\.output = 'reply' is none of them"):
        choose(["question", "answer"], format="alpaca", output="reply")


@pytest.mark.parametrize(
    "columns",
    [
        ["message_id", "parent_id", "role", "text"],
        ["role", "text"],
        ["conversation_id", "role", "content"],
        ["message_tree_id", "prompt"],
        ["text", "replies"],
    ],
)
def test_rows_that_are_messages_of_a_tree_are_refused_with_the_cure(columns):
    with pytest.raises(UserError, match=r"Write one row for each path.* set data\.format: text"):
        choose(columns)


def test_texts_of_a_tree_are_texts_if_the_user_says_so():
    assert choose(["parent_id", "role", "text"], format="text") == ("text", DataColumns())


@pytest.mark.parametrize(
    ("columns", "examples", "format", "names"),
    [
        (["conversation", "source"], "texts", "messages", {"messages": "conversation"}),
        (["instruction", "context", "response"], "texts", "alpaca",
         {"input": "context", "output": "response"}),
        (["inputs", "targets"], "texts", "prompt_completion",
         {"prompt": "inputs", "completion": "targets"}),
        (["question", "answer"], "texts", "alpaca",
         {"instruction": "question", "output": "answer"}),
        (["instruction", "input", "response"], "texts", "alpaca", {"output": "response"}),
        (["instruction", "input", "context", "response"], "texts", "alpaca",
         {"output": "response"}),
        (["instruction", "context", "output"], "texts", "alpaca", {"input": "context"}),
        (["query", "answers", "tools"], "texts", "prompt_completion",
         {"prompt": "query", "completion": "answers"}),
        (["query", "answer", "lang"], "texts", "prompt_completion",
         {"prompt": "query", "completion": "answer"}),
        (["messages", "rejected_response"], "pairs", "pairs",
         {"chosen": "messages", "rejected": "rejected_response"}),
        (["context", "response1", "response2", "overall_preference"], "pairs", "pairs",
         {"prompt": "context", "input": "context", "chosen": "response1", "rejected": "response2",
          "preference": "overall_preference"}),
        (["input", "output", "system_prompt"], "texts", "prompt_completion",
         {"prompt": "input", "completion": "output"}),
        (["prompt", "chosen", "rejected"], "pairs", "pairs", {}),
        (["chosen", "rejected", "messages", "prompt"], "pairs", "pairs", {}),
        (["question", "chosen", "rejected"], "pairs", "pairs", {"prompt": "question"}),
        (["input", "preferred_output", "non_preferred_output"], "pairs", "pairs",
         {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}),
        (["prompt", "chosen", "rejected", "chosen_rating", "rejected_rating"], "pairs", "pairs",
         {"score_chosen": "chosen_rating", "score_rejected": "rejected_rating"}),
        (["instruction", "completions"], "pairs", "ranked",
         {"prompt": "instruction", "answers": "completions"}),
        (["prompt", "completion", "label"], "rated", "prompt_completion", {"label": "label"}),
        (["conversations", "desirable"], "rated", "messages",
         {"messages": "conversations", "label": "desirable"}),
        (["prompt", "chosen", "rejected"], "rated", "pairs", {}),
    ],
)  # fmt: skip
def test_columns_are_known_by_their_public_names(columns, examples, format, names):
    assert choose(columns, examples=examples) == (format, DataColumns(**names))


@pytest.mark.parametrize(
    ("columns", "examples", "format", "names"),
    [
        (["messages", "problem", "solution"], "texts", "prompt_completion",
         {"prompt": "problem", "completion": "solution"}),
        (["messages", "answer"], "texts", "prompt_completion",
         {"prompt": "messages", "completion": "answer"}),
        (["messages", "body"], "texts", "text", {"text": "body"}),
        (["messages", "problem"], "texts", "messages", {"prompt": "problem"}),
        (["messages", "body"], "texts", "messages", {"system": "body"}),
        (["q", "chosen", "rejected", "answers"], "pairs", "pairs", {"prompt": "q"}),
    ],
)  # fmt: skip
def test_format_whose_columns_the_user_names_comes_first(columns, examples, format, names):
    assert choose(columns, examples=examples, **names) == (format, DataColumns(**names))


@pytest.mark.parametrize(
    ("columns", "examples", "message"),
    [
        (["input_ids"], "texts", "tokens (input_ids with labels or loss_mask)"),
        (["prompt", "chosen", "rejected"], "texts", "data.columns: {completion: chosen}"),
        (["prompt", "chosen", "rejected"], "texts", "train.objective: dpo, for one, trains"),
        (["chosen", "rejected"], "texts", "data.columns: {messages: chosen}"),
        (["system", "chat"], "texts", "data.columns: {text: chat}"),
        (["question", "solution", "answer"], "texts", "{instruction: question, output: solution}"),
        (["prompt", "completion"], "pairs", "those of pairs (chosen, rejected) or ranked"),
        (["prompt", "completion"], "rated", "data.columns.label names the column that says"),
    ],
)
def test_columns_that_mean_no_format_are_refused_with_what_to_set(columns, examples, message):
    with pytest.raises(UserError, match=re.escape(message)):
        choose(columns, examples=examples)


@pytest.mark.parametrize(
    ("format", "examples"), [("messages", "pairs"), ("pairs", "texts"), ("text", "rated")]
)
def test_format_of_other_examples_is_refused(format, examples):
    reason = rf"data\.format = '{format}': .* is trained on {examples}, .* Set auto, or one of"
    with pytest.raises(UserError, match=reason):
        choose(["text"], format=format, examples=examples)

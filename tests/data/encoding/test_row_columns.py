"""The columns of a source decide what its rows are, or are refused with what to set."""

import pytest

from workflow.lib.data.encoding.row_columns import choose_format
from workflow.lib.settings.data import DataColumns
from workflow.lib.system.errors import UserError


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
    chosen, _ = choose_format(columns, format="auto", columns=DataColumns(), setting="data.train")
    assert chosen == format


def test_missing_columns_lists_found_and_expected_and_the_key():
    names = DataColumns(prompt="question")
    with pytest.raises(UserError) as caught:
        choose_format(["q", "a"], format="prompt_completion", columns=names, setting="data.train")
    text = str(caught.value)
    assert "data.format = 'prompt_completion': data.train has the columns 'q', 'a'" in text
    assert "prompt_completion (question, completion)" in text
    assert "data.columns" in text


def test_misspelt_column_is_named_with_the_nearest_one():
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


def test_token_ids_without_targets_are_told_what_is_missing():
    with pytest.raises(UserError, match=r"tokens \(input_ids with labels or loss_mask\)"):
        choose_format(["input_ids"], format="auto", columns=DataColumns(), setting="data.train")


def test_column_names_cannot_speak_to_the_terminal():
    with pytest.raises(UserError) as caught:
        choose_format(["\x1b[2J"], format="auto", columns=DataColumns(), setting="data.train")
    assert r"\x1b[2J" in str(caught.value)


def test_names_that_the_user_chose_are_not_replaced():
    names = DataColumns(output="reply")
    with pytest.raises(UserError, match=r"data\.columns\.output = 'reply' is none of them"):
        choose_format(["question", "answer"], format="alpaca", columns=names, setting="data.train")


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
        choose_format(columns, format="auto", columns=DataColumns(), setting="data.train")


def test_texts_of_a_tree_are_texts_if_the_user_says_so():
    chosen = choose_format(
        ["parent_id", "role", "text"], format="text", columns=DataColumns(), setting="data.train"
    )
    assert chosen == ("text", DataColumns())


@pytest.mark.parametrize(
    ("columns", "setting"),
    [
        (["prompt", "chosen", "rejected"], "data.columns: {completion: chosen}"),
        (["chosen", "rejected"], "data.columns: {messages: chosen}"),
        (["system", "chat"], "data.columns: {text: chat}"),
        (["question", "solution", "answer"], "{instruction: question, output: solution}"),
    ],
)
def test_columns_that_mean_no_format_are_refused_with_what_to_set(columns, setting):
    with pytest.raises(UserError) as caught:
        choose_format(columns, format="auto", columns=DataColumns(), setting="data.train")
    assert setting in str(caught.value)


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
        (["prompt", "completion", "label"], "rated", "prompt_completion", {}),
        (["conversations", "desirable"], "rated", "messages",
         {"messages": "conversations", "label": "desirable"}),
        (["prompt", "chosen", "rejected"], "rated", "pairs", {}),
    ],
)  # fmt: skip
def test_columns_are_known_by_their_public_names(columns, examples, format, names):
    chosen = choose_format(
        columns, format="auto", columns=DataColumns(), setting="data.train", examples=examples
    )
    assert chosen == (format, DataColumns(**names))


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
    given = DataColumns(**names)
    chosen = choose_format(
        columns, format="auto", columns=given, setting="data.train", examples=examples
    )
    assert chosen == (format, given)


@pytest.mark.parametrize(
    ("columns", "examples", "message"),
    [
        (["prompt", "completion"], "pairs", r"those of pairs \(chosen, rejected\) or ranked"),
        (["prompt", "completion"], "rated", r"data\.columns\.label names the column that says"),
        (
            ["prompt", "chosen", "rejected"],
            "texts",
            "train.objective: dpo, for one, trains",
        ),
    ],
)
def test_columns_of_other_examples_are_refused_with_the_cure(columns, examples, message):
    with pytest.raises(UserError, match=message):
        choose_format(
            columns, format="auto", columns=DataColumns(), setting="data.train", examples=examples
        )


@pytest.mark.parametrize(
    ("format", "examples"), [("messages", "pairs"), ("pairs", "texts"), ("text", "rated")]
)
def test_format_of_other_examples_is_refused(format, examples):
    reason = rf"data\.format = '{format}': .* is trained on {examples}, .* Set auto, or one of"
    with pytest.raises(UserError, match=reason):
        choose_format(
            ["text"], format=format, columns=DataColumns(), setting="data.train", examples=examples
        )

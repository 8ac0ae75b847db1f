"""Every column and every key is read, or counted, or refused with what to set."""

import math
from typing import Any

import pytest

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import keys_in_template
from workflow.lib.data.encoding.keys_read import MAX_NAMES, OTHERS, KeyAudit
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError, UnwantedRowError
from workflow.lib.settings.data import DataColumns
from workflow.lib.system.errors import UserError

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"function": {"name": "f", "arguments": {}, "strict": True}, "index": 0, "type": "function"}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}


def row(*messages, **columns):
    return {"messages": list(messages or (QUESTION, ANSWER)), **columns}


def read(value, keys=None, format="messages"):
    return to_sample(value, format=format, columns=DataColumns(), keys=keys)


def not_read(*rows, format="messages", **options):
    keys = KeyAudit(**options)
    for value in rows:
        read(value, keys, format)
    return keys.report()[1]


@pytest.mark.parametrize(
    ("rows", "format", "counts"),
    [
        ([row(lang="de", score=0), row(lang="en"), row(lang=None)], "messages",
         {"lang": 2, "score": 1}),
        ([{"text": "a", "url": "b", "meta": {}}], "text", {"url": 1}),
        ([{"input_ids": [1], "labels": [1], "text": "a"}], "tokens", {"text": 1}),
        ([{"prompt": "q", "completion": "a", "rejected": "b"}], "prompt_completion",
         {"rejected": 1}),
        ([row({**QUESTION, "id": 1}, {**ANSWER, "id": 2})], "messages", {"id (message)": 2}),
        ([row(QUESTION, {**ANSWER, "label": False})], "messages", {"label (message)": 1}),
        ([row({"role": "user", "content": [{"type": "text", "text": "q", "note": "x"}]}, ANSWER)],
         "messages", {"note (part)": 1}),
        ([row(QUESTION, {"role": "assistant", "tool_calls": [CALL]})], "messages",
         {"index (call)": 1, "strict (function of a call)": 1}),
        ([row(tools=[{"type": "function", "function": {"name": "f"}, "origin": "x"}])], "messages",
         {"origin (tool)": 1}),
    ],
)  # fmt: skip
def test_what_nothing_reads_is_counted(rows, format, counts):
    assert not_read(*rows, format=format) == counts


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"weight": 0.5}, {"masked": True}, {"metadata": {"loss": 0}}]
)
def test_flags_of_turns_are_refused_where_every_token_is_trained(flag):
    talk = row(QUESTION, {**ANSWER, **flag}, QUESTION, ANSWER)
    with pytest.raises(
        RowError, match=r"message 2 has .* but data.loss_on = all .*set it to.*leave_out"
    ):
        read(talk, KeyAudit(all_trained=True))
    read(row(QUESTION, {**ANSWER, "train": True}), KeyAudit(all_trained=True))


def test_key_of_a_message_that_the_template_reads_is_read():
    template = "{% for m in messages %}{{ m['name'] }}{{ m.mood }}{{ m.get('tone') }}{% endfor %}"
    spoken = {**ANSWER, "name": "n", "mood": "m", "tone": "t", "id": 7}
    counts = not_read(row(QUESTION, spoken), template_keys=keys_in_template(template))
    assert counts == {"id (message)": 1}


def test_columns_that_were_read_are_listed():
    keys = KeyAudit()
    read(row(system="s", lang="de"), keys)
    assert keys.report()[0] == ["messages", "system"]


def test_names_without_end_are_counted_together():
    counts = not_read(*(row(**{f"k{n}": 1}) for n in range(MAX_NAMES + 50)))
    assert len(counts) == MAX_NAMES + 1
    assert counts[OTHERS[1]] == 50


@pytest.mark.parametrize(
    "value",
    [
        row(images=["a.png"]),
        row(image={"bytes": b"x", "path": None}),
        row(audio=b"x"),
        row(photo=[{"bytes": b"x", "path": None}]),
        row({**QUESTION, "images": ["a.png"]}, ANSWER),
        row({"role": "user", "content": [{"type": "text", "text": "q"}, PICTURE]}, ANSWER),
    ],
)
def test_media_are_refused_unless_the_user_omits_them(value):
    with pytest.raises(RowError, match=r"^not text: .* set data\.media: omit$"):
        read(value)
    keys = KeyAudit(omit_media=True)
    conversation = read(value, keys)
    assert conversation.messages == [QUESTION, ANSWER]
    assert list(keys.report()[1].values()) == [1]


@pytest.mark.parametrize("value", [row(images=[]), row(image=None), row(video="")])
def test_columns_without_media_are_no_media(value):
    assert not_read(value) == {}


def test_key_to_be_left_out_is_not_read_wherever_it_stands():
    value = row(QUESTION, {**ANSWER, "weight": 0.5}, system="s", mask="User")
    keys = KeyAudit(leave_out=["weight", "system", "mask"])
    conversation = read(value, keys)
    assert conversation == Conversation([QUESTION, ANSWER], [False, True])
    assert keys.report()[1] == {"system": 1, "mask": 1, "weight (message)": 1}


def trained(first, **columns):
    talk = [QUESTION, {**ANSWER, **first}, QUESTION, ANSWER]
    sample: Any = to_sample({"messages": talk, **columns}, format="messages", columns=DataColumns())
    assert sample.messages[3] == ANSWER
    return list(sample.trained)


@pytest.mark.parametrize(
    "keys",
    [
        {"train": False},
        {"loss": 0},
        {"training": False},
        {"trainable": 0.0},
        {"weight": 0},
        {"loss_weight": 0.0},
        {"masked": True},
        {"train": True, "weight": 0},
        {"train": {"loss": False}},
        {"train": "False"},
        {"weight": "0.0"},
        {"metadata": {"turn": {"train": False}}},
        {"notes": [{"by": 1}, {"train": False}]},
        {"loss": {"weight": 0, "why": "bad"}},
    ],
)
def test_turn_that_is_marked_is_not_trained(keys):
    assert trained(keys) == [False, False, False, True]


@pytest.mark.parametrize(
    "keys",
    [{"train": True}, {"loss": 1}, {"weight": 1.0}, {"train": None}, {"masked": False},
     {"train": "true"}, {"train": ""}, {"loss": "1"}, {"train_notes": "half"},
     {"metadata": {"train": True}}, {"trainer": "x"}, {"loss_reason": "text"}],
)  # fmt: skip
def test_turn_that_is_not_marked_is_trained(keys):
    assert trained(keys) == [False, True, False, True]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"train": "no"}, "unknown mask: message 2 has train = 'no', known are true and false"),
        ({"loss": []}, "unknown mask: message 2 has loss = []"),
        ({"weight": -1}, "unknown weight: message 2 has weight = -1, known are 0 and numbers from"),
        ({"loss_weight": math.nan}, "unknown weight: message 2 has loss_weight = nan"),
        ({"weight": math.inf}, "unknown weight: message 2 has weight = inf"),
        ({"weight": 1e-40}, "unknown weight: message 2 has weight = 1e-40"),
        ({"weight": 10**400}, "unknown weight: message 2 has weight = 1000"),
        ({"weight": "half"}, "unknown weight: message 2 has weight = 'half'"),
        ({"train_on_turn": "False"}, "unknown mask: message 2 has train_on_turn = False"),
        ({"loss_scale": "0.0"}, "unknown mask: message 2 has loss_scale = 0.0"),
        ({"train": 0.5}, "unknown weight: message 2 has train = 0.5, known are 0 and 1"),
        ({"mask": 1}, "unclear mask: message 2 has mask = 1, which means trained for some"),
        ({"train_on_turn": False}, "unknown mask: message 2 has train_on_turn = False"),
        ({"ignore": True}, "unknown mask: message 2 has ignore = True"),
        ({"lossScale": 0.0}, "unknown mask: message 2 has lossScale = 0.0"),
        ({"train_detail": [{"train": False}]}, "unknown mask: message 2 has train_detail = "),
        ({"metadata": {"weight": 0.3}}, "unknown weight: message 2 has weight = 0.3"),
    ],
)
def test_mask_that_cannot_be_read_is_refused_with_the_cure(keys, reason):
    with pytest.raises(RowError) as caught:
        trained(keys)
    assert str(caught.value).startswith(reason)
    assert "data.leave_out: [" in str(caught.value)


def test_question_that_is_marked_to_be_trained_is_refused():
    talk = [{**QUESTION, "train": True}, ANSWER]
    with pytest.raises(RowError, match="not an assistant's: message 1 is marked to be trained"):
        to_sample({"messages": talk}, format="messages", columns=DataColumns())


def test_question_of_weight_one_is_a_question():
    talk = [{**QUESTION, "weight": 1, "train": False}, ANSWER]
    sample: Any = to_sample({"messages": talk}, format="messages", columns=DataColumns())
    assert sample.trained == [False, True]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"train": False}, "not trained: column 'train' is False"),
        ({"weight": 0}, "not trained: column 'weight' is 0"),
        ({"metadata": {"train": False}}, "not trained: column 'train' is False"),
        ({"train": "0"}, "not trained: column 'train' is 0.0"),
        ({"sample_weight": "0.5"}, "unknown mask: the row has sample_weight = 0.5"),
        ({"weight": -0.5}, "unknown weight: the row has weight = -0.5"),
        ({"weight": "high"}, "unknown weight: the row has weight = 'high'"),
        ({"mask": "User"}, "unclear mask: the row has mask = 'User'"),
        ({"loss_mask": [0, 1, 0, 1]}, "unknown mask: the row has loss_mask = [0, 1, 0, 1]"),
        ({"weights": [0, 1]}, "unknown mask: the row has weights = [0, 1]"),
        ({"sample_weight": 0.5}, "unknown mask: the row has sample_weight = 0.5"),
        ({"assistant_masks": [0, 1]}, "unknown mask: the row has assistant_masks = [0, 1]"),
        ({"train": "no"}, "unknown mask: the row has train = 'no'"),
    ],
)
def test_flag_of_a_row_is_obeyed_or_refused(columns, reason):
    with pytest.raises(RowError) as caught:
        trained({}, **columns)
    assert str(caught.value).startswith(reason)


def labelled(label):
    row = {"messages": [QUESTION, ANSWER], "label": label}
    return to_sample(row, format="messages", columns=DataColumns(label="label"))


@pytest.mark.parametrize("label", [False, "False", 0, "0"])
def test_bad_answer_is_left_out_where_the_user_names_the_column(label):
    with pytest.raises(UnwantedRowError, match="column 'label' says that the answer is bad"):
        labelled(label)
    assert labelled(True) == labelled("1")
    with pytest.raises(RowError, match="no judgement: column 'label' is 'perhaps'"):
        labelled("perhaps")


@pytest.mark.parametrize("label", [False, "false"])
@pytest.mark.parametrize("name", ["label", "desirable", "is_desirable"])
def test_label_of_false_that_nobody_names_is_asked_about(name, label):
    with pytest.raises(UserError, match=rf"data.columns.label = null: .*leave_out: \[{name}\]"):
        trained({}, **{name: label})


@pytest.mark.parametrize(
    "columns",
    [{"label": True}, {"label": 0}, {"label": "no"}, {"label": "0"}, {"label": "false friend"},
     {"weight": 1},     {"weight": ""}, {"loss": None}, {"weight_kg": 70.5},
     {"attention_mask": [1, 1]}, {"train_steps": 7}],
)  # fmt: skip
def test_row_that_no_flag_forbids_is_trained(columns):
    assert trained({}, **columns) == [False, True, False, True]


@pytest.mark.parametrize(
    ("turn", "row", "weights", "of_row"),
    [
        ({"weight": 0.5}, {}, [0, 0.5, 0, 1], 1),
        ({"loss_weight": 2, "train": True}, {}, [0, 2, 0, 1], 1),
        ({"loss": {"weight": 0.25}}, {}, [0, 0.25, 0, 1], 1),
        ({"weight": 3, "train": False}, {}, None, 1),
        ({"weight": 0.5}, {"weight": 4}, [0, 0.5, 0, 1], 4),
        ({"weight": "0.5"}, {"weight": "4"}, [0, 0.5, 0, 1], 4),
        ({}, {"weight": 2, "loss_weight": 0.25}, None, 0.5),
        ({}, {"importance": 0.5}, None, 0.5),
    ],
)
def test_weights_of_turns_and_rows_are_read(turn, row, weights, of_row):
    value = {"messages": [QUESTION, {**ANSWER, **turn}, QUESTION, ANSWER], **row}
    columns = DataColumns(weight="importance" if "importance" in row else "weight")
    sample: Any = to_sample(value, format="messages", columns=columns)
    if of_row != 1:
        assert sample.weight == of_row
        sample = sample.sample
    assert sample.weights == weights

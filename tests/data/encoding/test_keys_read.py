"""Every column and every key is read, or counted, or refused with what to set."""

import pytest

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import keys_in_template
from workflow.lib.data.encoding.keys_read import MAX_NAMES, OTHERS, KeyAccount
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.settings.data import DataColumns

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"function": {"name": "f", "arguments": {}, "strict": True}, "index": 0, "type": "function"}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}


def row(*messages, **columns):
    return {"messages": list(messages or (QUESTION, ANSWER)), **columns}


def read(value, keys=None, format="messages"):
    return to_sample(value, format=format, columns=DataColumns(), keys=keys)


def not_read(*rows, format="messages", **options):
    keys = KeyAccount(**options)
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


def test_key_of_a_message_that_the_template_reads_is_read():
    template = "{% for m in messages %}{{ m['name'] }}{{ m.mood }}{{ m.get('tone') }}{% endfor %}"
    spoken = {**ANSWER, "name": "n", "mood": "m", "tone": "t", "id": 7}
    counts = not_read(row(QUESTION, spoken), template_keys=keys_in_template(template))
    assert counts == {"id (message)": 1}


def test_columns_that_were_read_are_listed():
    keys = KeyAccount()
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
    keys = KeyAccount(omit_media=True)
    conversation = read(value, keys)
    assert conversation.messages == [QUESTION, ANSWER]
    assert list(keys.report()[1].values()) == [1]


@pytest.mark.parametrize("value", [row(images=[]), row(image=None), row(video="")])
def test_columns_without_media_are_no_media(value):
    assert not_read(value) == {}


def test_key_to_be_left_out_is_not_read_wherever_it_stands():
    value = row(QUESTION, {**ANSWER, "weight": 0.5}, system="s", mask="User")
    keys = KeyAccount(leave_out=["weight", "system", "mask"])
    conversation = read(value, keys)
    assert conversation == Conversation([QUESTION, ANSWER], [False, True])
    assert keys.report()[1] == {"system": 1, "mask": 1, "weight (message)": 1}

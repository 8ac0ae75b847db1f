"""Items of tasks that training rows repeat are found, wherever they stand in them."""

from types import SimpleNamespace

import numpy as np
import pytest

from workflow.lib.evaluation.task_overlap import RUN, overlap_shares


def tokenizer(text, *, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": [int(word) for word in text.split()]}


def shares(documents, rows):
    tasks = {"task": SimpleNamespace(eval_docs=documents)}
    return overlap_shares(tasks, np.array(rows, np.uint32), tokenizer)["task"]


def text(*numbers):
    return " ".join(map(str, numbers))


ROWS = [range(100, 140), range(200, 240)]


@pytest.mark.parametrize(
    ("document", "share"),
    [
        ({"text": text(*range(203, 203 + RUN))}, 1.0),
        ({"text": text(*range(203, 203 + RUN - 1), 7)}, 0.0),
        ({"text": text(*range(110, 110 + RUN), *range(900, 900 + RUN))}, 0.5),
        ({"text": text(*range(135, 140), *range(200, 206))}, 0.0),  # over the end of a row
        ({"question": text(*range(5)), "choices": [text(*range(100, 120)), text(1, 2)]}, 1.0),
        ({"question": text(*range(5)), "label": 3}, None),
        ({"question": text(*[0] * RUN)}, 0.0),
    ],
)
def test_share_is_that_of_the_tokens_in_runs_of_training_rows(document, share):
    assert shares([document], ROWS) == [share]


def test_rows_shorter_than_a_run_and_tasks_without_items_repeat_nothing():
    assert shares([{"text": text(*range(100, 140))}], [[100, 101, 102]]) == [0.0]
    assert shares([], ROWS) == []


def test_every_row_is_searched_however_many_are_hashed_at_a_time(monkeypatch):
    monkeypatch.setattr("workflow.lib.evaluation.task_overlap.CHUNK_TOKENS", 1)
    documents = [{"text": text(*row)} for row in ROWS]
    assert shares(documents, ROWS) == [1.0, 1.0]


def test_wording_that_items_share_does_not_count():
    wording = text(*range(100, 120))
    documents = [{"text": f"{wording} {text(*range(900, 915))}"}, {"text": wording}]
    assert shares(documents, ROWS) == [0.0, 0.0]

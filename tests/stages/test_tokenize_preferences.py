"""The stage `tokenize_dataset` on pairs and rated answers: in rows, held out, listed."""

from itertools import pairwise

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.tokenizing import expected_ids, save_rows
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.errors import UserError

NUM_TRAIN, NUM_HELDOUT = 23, 5


def pairs(count, *, start=0):
    return [
        {"prompt": f"Q{n}?", "chosen": f"Yes, {'very ' * (n % 3)}{n}.", "rejected": f"No {n}."}
        for n in range(start, start + count)
    ]


def rated(count, *, start=0):
    return [
        {"prompt": f"Q{n}?", "completion": f"Yes {'very ' * (n % 3)}{n}.", "label": n % 3 == 0}
        for n in range(start, start + count)
    ]


def prepared(stage, make, examples, **settings):
    stage.examples = examples
    save_rows(stage.train, make(NUM_TRAIN))
    if stage.heldout:
        save_rows(stage.heldout, make(NUM_HELDOUT, start=1000))
    return stage.run(**settings)


def examples_of(store):
    """Each training example as the two documents in which it lies; the padding is left out."""
    found = []
    for ids, mask, positions in zip(
        store.input_ids, store.loss_mask, store.position_ids, strict=True
    ):
        edges = [*np.flatnonzero(positions == 0).tolist(), store.seq_len]
        spans = [slice(*edge) for edge in pairwise(edges) if mask[slice(*edge)].any()]
        documents = [tuple(ids[span].tolist()) for span in spans]
        found += zip(documents[::2], documents[1::2], strict=True)
    return found


def answered(stage, row, answer):
    return tuple(expected_ids(stage, {"prompt": row["prompt"], "completion": answer}))


def test_pair_is_two_neighbours_of_a_row_as_a_supervised_answer_would_be_encoded(stage):
    store = prepared(stage, pairs, "pairs")
    expected = [
        (answered(stage, row, row["chosen"]), answered(stage, row, row["rejected"]))
        for row in pairs(NUM_TRAIN)
    ]
    assert sorted(examples_of(store)) == sorted(expected)
    assert store.examples == "pairs"
    assert store.num_rows < NUM_TRAIN
    counts = store.manifest["splits"]["train"]
    assert (counts["documents"], counts["rows_kept"]) == (2 * NUM_TRAIN, NUM_TRAIN)


def test_heldout_pairs_alternate_in_file_order(stage):
    read = [ids.tolist() for ids, _ in prepared(stage, pairs, "pairs").heldout_documents()]
    assert read == [
        list(answered(stage, row, row[side]))
        for row in pairs(NUM_HELDOUT, start=1000)
        for side in ("chosen", "rejected")
    ]


def test_weight_of_a_source_repeats_whole_pairs(stage):
    store = prepared(stage, pairs, "pairs", train={"path": str(stage.train), "weight": 2})
    assert len(examples_of(store)) == 2 * NUM_TRAIN
    assert len({*examples_of(store)}) == NUM_TRAIN


def test_pairs_too_long_for_a_row_are_cut_at_the_longer_answer_or_dropped(stage):
    long = {"prompt": "q", "chosen": "long " * stage.config()["data"]["seq_len"], "rejected": "no"}
    save_rows(stage.train, [*pairs(NUM_TRAIN), long])
    stage.examples = "pairs"
    save_rows(stage.heldout, pairs(NUM_HELDOUT, start=1000))
    store = stage.run()
    whole = answered(stage, long, "no")
    (cut,) = [chosen for chosen, rejected in examples_of(store) if rejected == whole]
    assert len(cut) == store.seq_len - len(whole)
    assert store.manifest["splits"]["train"]["truncated"] == 1
    dropped = stage.run(overlong="drop").manifest["dropped_by_reason"]
    assert dropped == {"overlong": 1}


def test_prompts_of_pairs_are_on_one_side_of_the_split(stage):
    stage.heldout = None
    stage.examples = "pairs"
    rows = pairs(NUM_TRAIN)
    save_rows(stage.train, [row | {"chosen": f"{x} {row['chosen']}"} for row in rows for x in "ab"])
    store = stage.run(heldout_share=0.2)
    tokenizer = AutoTokenizer.from_pretrained(stage.tokenizer)

    def prompts(documents):
        return {tokenizer.decode(ids).split("<|assistant|>")[0] for ids in documents}

    held = prompts(ids for ids, _ in store.heldout_documents())
    trained = prompts(chosen for chosen, _ in examples_of(store))
    assert held
    assert len(held) + len(trained) == NUM_TRAIN


def test_heldout_pair_whose_answer_is_nearly_trained_is_dropped(stage):
    text = "The answer of {} has enough words that it counts by itself, whatever was asked before."
    row = {"prompt": "Why?", "chosen": text.format("seven"), "rejected": "No."}
    stage.examples = "pairs"
    save_rows(stage.train, [*pairs(NUM_TRAIN), row])
    again = row | {"prompt": "How so?", "chosen": "Well. " + row["chosen"]}
    save_rows(stage.heldout, [*pairs(NUM_HELDOUT, start=1000), again])
    store = stage.run(near_duplicates="remove", seq_len=256)
    assert store.num_heldout_documents == 2 * NUM_HELDOUT
    (line,) = read_lines(stage.output / "rejects.jsonl")
    assert line["reason"].startswith("near-duplicate of a training row: row 24 of")


def test_ties_and_equal_pairs_are_listed_with_their_reason(stage):
    tie = pairs(1, start=50)[0] | {"score_chosen": 3, "score_rejected": 3}
    equal = {"prompt": "q", "chosen": "a", "rejected": "a"}
    stage.examples = "pairs"
    save_rows(stage.train, [*pairs(NUM_TRAIN), tie, equal])
    save_rows(stage.heldout, pairs(NUM_HELDOUT, start=1000))
    store = stage.run(max_rejected_share=0.1)
    assert store.manifest["dropped_by_reason"] == {"equal answers": 1, "tie": 1}
    with pytest.raises(UserError, match="2 of 25 rows"):
        stage.run(max_rejected_share=0.05)


def test_rated_answer_stands_beside_its_prompt_with_the_answer_of_the_next_row(stage):
    store = prepared(stage, rated, "rated")
    rows = rated(NUM_TRAIN)
    expected = [
        (answered(stage, row, row["completion"]), answered(stage, row, other["completion"]))
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    assert sorted(examples_of(store)) == sorted(expected)


def test_every_token_of_a_rated_example_says_whether_its_answer_is_good(stage):
    store = prepared(stage, rated, "rated")
    good = {answered(stage, row, row["completion"]) for row in rated(NUM_TRAIN) if row["label"]}
    for ids, desirable, positions in zip(
        store.input_ids, store.desirable, store.position_ids, strict=True
    ):
        edges = [*np.flatnonzero(positions == 0).tolist(), store.seq_len]
        # where each example begins, its second document begins, and the next example does
        for first, second, last in zip(edges[::2], edges[1::2], edges[2::2], strict=False):
            is_good = tuple(ids[first:second].tolist()) in good
            assert desirable[first:last].tolist() == [is_good] * (last - first)
    heldout = [row["label"] for row in rated(NUM_HELDOUT, start=1000) for _ in range(2)]
    assert store.heldout_desirable.tolist() == heldout
    assert store.manifest["splits"]["train"]["good_answers"] == len(good)


def test_rated_answers_of_one_kind_are_refused_with_the_cure(stage):
    def make(count, start=0):
        return [row | {"label": True} for row in rated(count, start=start)]

    with pytest.raises(UserError, match=r"all 23 answers of .* are good .*train.objective: sft"):
        prepared(stage, make, "rated")


def test_answers_that_are_all_the_same_are_refused(stage):
    def make(count, start=0):
        return [row | {"completion": "Same."} for row in rated(count, start=start)]

    with pytest.raises(UserError, match=r"row 1 of .* finds no other answer to another prompt"):
        prepared(stage, make, "rated")


def test_pairs_are_rated_answers_too(stage):
    store = prepared(stage, pairs, "rated")
    assert store.manifest["splits"]["train"]["documents"] == 4 * NUM_TRAIN
    assert store.manifest["splits"]["train"]["good_answers"] == NUM_TRAIN
    rows = pairs(NUM_TRAIN)
    beside = dict(examples_of(store))
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        neighbour = answered(stage, row, other["chosen"])
        assert beside[answered(stage, row, row["chosen"])] == neighbour
        assert beside[answered(stage, row, row["rejected"])] == neighbour


@pytest.mark.parametrize(
    ("make", "examples", "answers"),
    [
        (pairs, "pairs", ["chosen", "rejected"]),
        (rated, "rated", ["good answer", "answer of another row"]),
    ],
)
def test_samples_say_which_answer_they_show(stage, make, examples, answers):
    origins = prepared(stage, make, examples).manifest["sample_origins"]
    assert [origin["answer"] for origin in origins[:2]] == answers


def test_samples_show_no_key_of_a_service(stage):
    key = "sk-ant-" + "api03-" + "x" * 80

    def make(count, start=0):
        return [row | {"chosen": f"{row['chosen']} {key}"} for row in pairs(count, start=start)]

    samples = prepared(stage, make, "pairs").manifest["samples"]
    texts = [text for sample in samples for text in sample]
    assert any("***" in text for text, _ in texts)
    assert not any(key in text for text, _ in texts)

"""What the stage `tokenize_dataset` holds out: which rows, and none that is trained on."""

import pytest

from tests.support.tokenizing import (
    NUM_HELDOUT,
    NUM_TRAIN,
    documents_of,
    expected_ids,
    rows,
    save_rows,
)
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.errors import UserError


def test_share_of_the_training_file_is_held_out_if_no_file_is_given(stage):
    stage.heldout = None
    save_rows(stage.train, ["", *rows(NUM_TRAIN - 1), "{broken"])  # line 1 is no row
    store = stage.run(heldout_share=0.2, max_rejected_share=0.1)
    splits = store.manifest["splits"]
    assert splits["heldout"]["rows_read"] == round(0.2 * NUM_TRAIN)
    assert splits["train"]["rows_read"] + splits["heldout"]["rows_read"] == NUM_TRAIN
    assert splits["train"]["rows_dropped"] + splits["heldout"]["rows_dropped"] == 1
    heldout = {tuple(ids.tolist()) for ids, _ in store.heldout_documents()}
    assert len(heldout | documents_of(store).keys()) == NUM_TRAIN - 1


def test_seed_decides_which_rows_are_held_out(stage):
    stage.heldout = None
    first, again, other = (
        {tuple(ids.tolist()) for ids, _ in stage.run(seed=seed).heldout_documents()}
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_training_rows_are_taken_out_of_the_heldout_ones(stage):
    save_rows(stage.heldout, [*rows(NUM_HELDOUT, start=1000), *rows(2)])
    store = stage.run()
    heldout = store.manifest["splits"]["heldout"]
    assert store.num_heldout_documents == NUM_HELDOUT
    assert store.manifest["train_heldout_overlap"] == 2
    assert (heldout["rows_read"], heldout["rows_kept"], heldout["rows_dropped"]) == (9, 7, 2)
    first, _ = read_lines(stage.output / "rejects.jsonl")
    assert first["row"] == NUM_HELDOUT + 1
    assert first["reason"] == "duplicate of a training row"
    assert "Question 0?" in first["preview"]


STORY = (
    "In a village by the sea there lived an old fisherman who mended nets every evening while his "
    "daughter read him letters from far away, and nobody knew who had written them or why."
)
STRANGER = "Matrices that are symmetric have real eigenvalues and orthogonal eigenvectors, always."


def stories(stage):
    """Save one training row that a held-out row nearly repeats, among rows that nothing repeats."""
    save_rows(stage.train, [*rows(NUM_TRAIN), {"prompt": "Tell.", "completion": STORY}])
    changed = STORY.replace("old fisherman", "OLD, tired fisherman")
    pairs = [("Tell.", changed), ("Explain.", STRANGER)]
    save_rows(stage.heldout, [{"prompt": p, "completion": c} for p, c in pairs])


def test_near_duplicates_of_training_rows_are_taken_out_of_the_heldout_ones(stage):
    stories(stage)
    store = stage.run(near_duplicates="remove", seq_len=256)
    assert (store.num_heldout_documents, store.manifest["train_heldout_near_duplicates"]) == (1, 1)
    (line,) = read_lines(stage.output / "rejects.jsonl")
    assert line["row"] == 1
    assert f"row {NUM_TRAIN + 1} of {stage.train} trains " in line["reason"]
    assert "In a village by the sea there" in line["reason"]
    assert store.manifest["dropped_by_reason"] == {"near-duplicate of a training row": 1}


def test_near_duplicates_can_be_refused_or_kept(stage):
    stories(stage)
    with pytest.raises(
        UserError, match=r"data\.near_duplicates = 'refuse': 1 held-out rows .*\n  row 1: "
    ):
        stage.run(near_duplicates="refuse", seq_len=256)
    store = stage.run(near_duplicates="keep", seq_len=256)
    assert (store.num_heldout_documents, store.manifest["train_heldout_near_duplicates"]) == (2, 1)


def test_threshold_decides_what_is_a_near_duplicate(stage):
    stories(stage)
    settings = {"near_duplicates": "remove", "near_duplicate_threshold": 1.0, "seq_len": 256}
    assert stage.run(**settings).num_heldout_documents == 2


def test_duplicates_are_counted_and_kept(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), *rows(3)])
    train = stage.run().manifest["splits"]["train"]
    assert (train["duplicates"], train["rows_kept"]) == (3, NUM_TRAIN + 3)


def test_split_without_any_document_stops(stage):
    save_rows(stage.heldout, rows(3))  # all of them training rows
    with pytest.raises(UserError, match=r"data\.heldout: no document is left .* 3 of them dropped"):
        stage.run()


def test_split_of_near_duplicates_alone_says_what_they_are(stage):
    stories(stage)
    save_rows(stage.heldout, [{"prompt": "Tell.", "completion": STORY.upper()}])
    with pytest.raises(
        UserError, match=r"1 as they nearly repeat one .* raise data\.near_duplicate_threshold"
    ) as raised:
        stage.run(near_duplicates="remove", seq_len=256)
    assert "more rows" not in str(raised.value)


def test_rows_that_share_a_system_text_alone_stay_held_out(stage):
    prompts = [f"{STORY} {STRANGER} Question {n}?" for n in (1, 2)]
    save_rows(stage.train, [*rows(NUM_TRAIN), {"prompt": prompts[0], "completion": "yes"}])
    save_rows(stage.heldout, [{"prompt": prompts[1], "completion": "no"}])
    assert stage.run(near_duplicates="remove", seq_len=256).num_heldout_documents == 1


def test_one_row_cannot_be_two_splits(stage):
    stage.heldout = None
    save_rows(stage.train, rows(1))
    with pytest.raises(
        UserError, match=r"data\.train: no document is left .* or change data\.heldout_share"
    ):
        stage.run()


def test_heldout_file_needs_columns_of_some_format(stage):
    save_rows(stage.heldout, [{"body": "x"}])
    with pytest.raises(UserError, match=r"data\.heldout has the columns 'body', but expected"):
        stage.run()


def test_every_held_out_document_knows_its_source(stage):
    more = save_rows(stage.folder / "more.jsonl", rows(3, start=2000))
    named = [{"path": str(stage.heldout), "name": "first"}, {"path": str(more), "name": "more"}]
    store = stage.run(heldout=named)
    assert store.heldout_sources() == ["first"] * NUM_HELDOUT + ["more"] * 3


def test_sources_of_documents_split_off_are_told_too(stage):
    stage.heldout = None
    others = rows(40, start=2000)
    more = save_rows(stage.folder / "more.jsonl", others)
    named = [{"path": str(stage.train), "name": "first"}, {"path": str(more), "name": "more"}]
    store = stage.run(train=named, heldout_share=0.5)
    from_more = {tuple(expected_ids(stage, row)) for row in others}
    documents = [tuple(ids.tolist()) for ids, _ in store.heldout_documents()]
    expected = ["more" if ids in from_more else "first" for ids in documents]
    assert store.heldout_sources() == expected
    assert set(expected) == {"first", "more"}


def grouped_rows(count, *, per_group, start=0):
    return [
        row | {"chat": (start + number) // per_group}
        for number, row in enumerate(rows(count, start=start))
    ]


def test_rows_of_a_group_are_on_one_side(stage):
    stage.heldout = None
    content = grouped_rows(60, per_group=4)
    save_rows(stage.train, content)
    store = stage.run(group_by="chat", heldout_share=0.2)
    groups = {tuple(expected_ids(stage, row)): row["chat"] for row in content}
    held = [groups[tuple(ids.tolist())] for ids, _ in store.heldout_documents()]
    assert len(held) == 12
    assert not set(held) & {groups[ids] for ids in documents_of(store)}
    sources = store.manifest["sources"]
    assert not any("chat" in source["not_read"] for source in sources)


def test_group_of_a_training_row_is_taken_out_of_the_heldout_ones(stage):
    save_rows(stage.train, grouped_rows(NUM_TRAIN, per_group=4))
    save_rows(stage.heldout, grouped_rows(8, per_group=4, start=NUM_TRAIN - 1))
    store = stage.run(group_by="chat", near_duplicates="remove", near_duplicate_threshold=1.0)
    reasons = [line["reason"] for line in read_lines(stage.output / "rejects.jsonl")]
    others = [f"group of a training row: row {NUM_TRAIN} of {stage.train}"] * 3
    assert reasons == ["duplicate of a training row", *others]
    assert store.manifest["train_heldout_shared_groups"] == 3
    with pytest.raises(UserError, match=r"group of a training row: row 53 of"):
        stage.run(group_by="chat", near_duplicates="refuse")


def test_group_column_that_is_missing_is_named(stage):
    with pytest.raises(UserError, match=r"data\.group_by = 'user': data\.train has the columns"):
        stage.run(group_by="user")


def test_row_without_a_group_is_dropped(stage):
    stage.heldout = None
    content = grouped_rows(60, per_group=4)
    content[5]["chat"] = None
    save_rows(stage.train, content)
    stage.run(group_by="chat", max_rejected_share=0.1)
    (line,) = read_lines(stage.output / "rejects.jsonl")
    assert line["reason"] == "no group: column 'chat' (data.group_by) is null"


def test_one_group_cannot_be_two_splits(stage):
    stage.heldout = None
    save_rows(stage.train, grouped_rows(9, per_group=100))
    with pytest.raises(UserError, match=r"data\.group_by: all rows .* are of one group"):
        stage.run(group_by="chat")

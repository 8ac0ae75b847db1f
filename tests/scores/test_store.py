"""Scores are read as they were computed, in the order in which training asks for them; anything
else is refused.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.support.models import random_store
from tests.support.scores import FACTS, SHARD_TOKENS, made_up, scored, tokens_of, written
from tests.system.test_checksums import flip
from workflow.lib.data.tokens.token_store import ARRAYS
from workflow.lib.scores.store import Scores, ScoreStore, ScoreWriter, parts_of, recorded_scores
from workflow.lib.system.checksums import check_files
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize("top_k", [0, 3])
def test_scores_of_rows_come_in_the_order_of_the_rows(tmp_path: Path, top_k: int) -> None:
    """Row 4 and a later one are in other shards than row 0."""
    tokens = tokens_of(random_store(rows=11, seq_len=32))
    every = written(tmp_path / "scores", tokens, top_k=top_k)
    store = ScoreStore.open(tmp_path / "scores", tokens=tokens, top_k=top_k)
    ends = np.cumsum(tokens.trained_tokens_per_row)
    begins = ends - tokens.trained_tokens_per_row
    wanted = np.concatenate([np.arange(begins[row], ends[row]) for row in (7, 0, 4)])
    found = store.for_rows([7, 0, 4])
    for name in Scores._fields:
        expected, array = getattr(every["train"], name), getattr(found, name)
        if expected is None:
            assert array is None
        else:
            np.testing.assert_array_equal(array, expected[wanted])


def test_scores_of_a_held_out_document_are_those_of_its_trained_tokens(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    every = written(tmp_path / "scores", tokens)
    store = ScoreStore.open(tmp_path / "scores", tokens=tokens)
    first, second, _ = (int(mask.sum()) for _, mask in tokens.heldout_documents())
    expected = every["heldout"].log_probs[first : first + second]
    np.testing.assert_array_equal(store.heldout(1).log_probs, expected)


def test_no_rows_have_no_scores(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    written(tmp_path / "scores", tokens, top_k=3)
    found = ScoreStore.open(tmp_path / "scores", tokens=tokens, top_k=3).for_rows([])
    assert found.top_ids is not None
    assert found.top_ids.shape == (0, 3)


@pytest.mark.parametrize("name", ARRAYS)
def test_scores_of_other_tokens_are_refused(tmp_path: Path, name: str) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    written(tmp_path / "scores", tokens)
    tokens.manifest["files"][name] = "0" * 64
    with pytest.raises(UserError, match=r"are of other tokens .* Delete its folder"):
        ScoreStore.open(tmp_path / "scores", tokens=tokens)


def test_scores_with_another_k_are_refused(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    written(tmp_path / "scores", tokens, top_k=3)
    with pytest.raises(UserError, match=r"have the 3 likeliest .*, and 4 are wanted"):
        ScoreStore.open(tmp_path / "scores", tokens=tokens, top_k=4)


def test_cut_or_changed_file_is_refused(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    written(tmp_path / "scores", tokens)
    path = tmp_path / "scores" / "train-00000.log_probs.npy"
    flip(path, -4)
    with pytest.raises(UserError, match=r"train-00000.log_probs.npy is damaged"):
        check_files(recorded_scores(tmp_path / "scores"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"train-00000.log_probs.npy is damaged"):
        ScoreStore.open(tmp_path / "scores", tokens=tokens)


def test_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    with pytest.raises(UserError, match="is no finished folder of scores"):
        ScoreStore.open(tmp_path, tokens=tokens)


def test_scores_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    tokens = tokens_of(random_store(rows=2, seq_len=32))
    with pytest.raises(UserError, match=rf"{FACTS['model']} gives .* not finite"):
        written(tmp_path / "scores", tokens, change=lambda scores: scored(scores, np.nan))


def writer(folder: Path, **changes: object) -> ScoreWriter:
    tokens = tokens_of(random_store(rows=11, seq_len=32))
    facts = FACTS | {"top_k": 0} | changes
    return ScoreWriter(folder / "scores", facts, tokens, shard_tokens=SHARD_TOKENS)


def begun(folder: Path) -> ScoreWriter:
    """Return a writer that has written one shard."""
    killed = writer(folder)
    first = killed.prepare()[0]
    killed.add(first, made_up(first.tokens))
    return killed


def test_parts_hold_every_row_and_document_once() -> None:
    tokens = tokens_of(random_store(rows=11, seq_len=32))
    parts = parts_of(tokens, shard_tokens=SHARD_TOKENS)
    assert [(p.split, p.number, p.first, p.count) for p in parts] == [
        ("train", 0, 0, 4),
        ("train", 1, 4, 4),
        ("train", 2, 8, 3),
        ("heldout", 0, 0, 3),
    ]


def test_finished_shards_of_the_same_content_stay(tmp_path: Path) -> None:
    begun(tmp_path)
    again = writer(tmp_path)
    assert again.prepare() == again.parts[1:]


@pytest.mark.parametrize("change", [{"top_k": 2}, {"model_files": {"a": "0"}}, {"way": "streamed"}])
def test_shards_of_other_content_are_made_again(tmp_path: Path, change: dict[str, object]) -> None:
    begun(tmp_path)
    other = writer(tmp_path, **change)
    assert other.prepare() == other.parts


def test_damaged_shard_is_made_again(tmp_path: Path) -> None:
    begun(tmp_path)
    flip(tmp_path / ".scores.partial" / "train-00000.log_probs.npy", -4)
    again = writer(tmp_path)
    assert again.prepare() == again.parts


def test_scores_that_no_disk_can_hold_are_refused_before_the_work(tmp_path):
    with pytest.raises(UserError, match=r"bytes each\), and .* GiB are free .* distill.top_k"):
        writer(tmp_path, top_k=2**40).prepare()


def test_work_in_progress_is_gone_when_all_is_there(tmp_path: Path) -> None:
    writing = begun(tmp_path)
    for part in writing.prepare():
        writing.add(part, made_up(part.tokens))
    manifest = writing.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["scores"]
    names = {path.name for path in (tmp_path / "scores").iterdir()}
    assert len(names) == 1 + len(manifest.shards)

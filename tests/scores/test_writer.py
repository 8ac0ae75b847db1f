"""Work of a killed writer is not done again, and work of another content is."""

from pathlib import Path

import pytest

from tests.support.models import random_store
from tests.support.scores import FACTS, SHARD_TOKENS, made_up, tokens_of
from tests.system.test_checksums import flip
from workflow.lib.scores.writer import ScoreWriter, parts_of
from workflow.lib.system.errors import UserError


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

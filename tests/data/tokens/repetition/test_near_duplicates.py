"""Near-duplicates within splits on disk: the same are found however few keys are in memory at a
time."""

import numpy as np

from tests.support.token_splits import all_trained, separate, split_of
from workflow.lib.data.tokens.repetition.near_duplicates import (
    Measure,
    find_near_duplicates,
    write_keys,
)

VOCABULARY = 5000


def test_same_near_duplicates_are_found_however_few_keys_are_in_memory(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    originals = [draw.integers(1, VOCABULARY, size=90, dtype=np.uint32) for _ in range(40)]
    changed = [np.concatenate([ids[:60], ids[62:]]) for ids in originals]
    train = split_of(tmp_path, "train", [all_trained(ids) for ids in [*originals, *changed[:15]]])
    others = [*changed[20:31], originals[0][::-1].copy()]
    heldout = split_of(tmp_path, "heldout", [all_trained(ids) for ids in others])
    measure = Measure(separate(VOCABULARY), np.empty(0, dtype=np.uint64), threshold=0.5)
    write_keys([train, heldout], measure, processes=1)
    at_once = find_near_duplicates(train, heldout, measure, processes=1)
    assert (at_once.train, at_once.heldout) == (15, 0)
    assert [(m.heldout, m.train) for m in at_once.matches] == [(n, n + 20) for n in range(11)]
    assert find_near_duplicates(train, heldout, measure, processes=1, keys_at_once=4) == at_once
    monkeypatch.setattr("workflow.lib.data.tokens.repetition.near_duplicates.BLOCK", 5)
    assert find_near_duplicates(train, heldout, measure, processes=1, keys_at_once=4) == at_once

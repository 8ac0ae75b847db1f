"""Packing in windows: every document once, whatever the number of windows."""

import numpy as np

from tests.support.token_splits import split_of
from workflow.lib.data.tokens.token_writer import blocks, packing_windows

SEQ_LEN = 61
DOCUMENTS = 377  # in 54 shards


def documents():
    """The ids of document n are 1000 n, 1000 n + 1 and so on."""
    draw = np.random.default_rng(0)
    for number in range(DOCUMENTS):
        ids = 1000 * number + np.arange(draw.integers(2, SEQ_LEN + 1), dtype=np.uint32)
        yield ids, np.arange(len(ids)) > 0


def test_windows_hold_every_document_once_and_are_nearly_as_full(tmp_path):
    split = split_of(tmp_path, "train", list(documents()))
    tokens = int(split.documents.lengths.sum())
    rows = []
    for window_tokens in (tokens, tokens // 3):
        windows = list(
            packing_windows(
                split, seq_len=SEQ_LEN, seed=0, packing=True, window_tokens=window_tokens
            )
        )
        firsts = np.concatenate([window.ids[window.starts] for window in windows])
        assert sorted(firsts) == [1000 * number for number in range(DOCUMENTS)]
        rows.append(sum(window.packing.num_rows for window in windows))
    assert rows[0] <= rows[1] <= 1.05 * rows[0]


def test_blocks_hold_the_chosen_documents_in_order(tmp_path):
    split = split_of(tmp_path, "train", list(documents())).without_rows(
        np.array([0, 30, 31], dtype=np.uint64)
    )
    parts = list(blocks(split))
    ids = np.concatenate([part[0] for part in parts])
    lengths = np.concatenate([part[2] for part in parts])
    firsts = ids[np.cumsum(lengths) - lengths]
    wanted = [number for number in range(DOCUMENTS) if number not in (0, 30, 31)]
    assert firsts.tolist() == [1000 * number for number in wanted]
    assert split.rows_dropped == 3

"""Packing in windows: every document once, whatever the number of windows."""

from functools import partial

import numpy as np

from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.data.reading.row_chunks import Row
from workflow.lib.data.tokens.corpus import Corpus
from workflow.lib.data.tokens.corpus_documents import collect_documents
from workflow.lib.data.tokens.encoded_shards import Shard, encode_rows, read_facts
from workflow.lib.data.tokens.overlong import Begun
from workflow.lib.data.tokens.splits import whole_corpus
from workflow.lib.data.tokens.token_writer import blocks, packing_windows

SEQ_LEN = 61
SHARDS = 13


def split_of(folder):
    """Encode 13 shards of 29 rows: the ids of row n are n, n + 1 and so on."""
    draw = np.random.default_rng(0)

    def encode(row):
        ids = row.number + np.arange(draw.integers(2, SEQ_LEN + 1), dtype=np.uint32)
        return [Encoded(ids, np.arange(len(ids)) > 0, False)]

    shards: list[Shard] = []
    for number in range(SHARDS):
        rows = [Row(1000 * (29 * number + index), {}) for index in range(29)]
        stem = folder / f"train-{number}"
        encode_rows(
            rows,
            begin=lambda row: Begun(partial(encode, row)),
            keys=KeyAudit(),
            seq_len=SEQ_LEN,
            overlong="drop",
            stem=stem,
        )
        facts = read_facts(stem)
        shards.append(Shard(stem, 0, 29 * number, 29, facts.documents, facts.tokens))
    corpus = Corpus(sources=[], files=[], shards=shards, rows_read=29 * SHARDS)
    documents = collect_documents(shards, folder=folder, name="train")
    return whole_corpus("train", corpus, documents, np.empty(0, dtype=np.int64))


def test_windows_hold_every_document_once_and_are_nearly_as_full(tmp_path):
    split = split_of(tmp_path)
    tokens = int(split.documents.lengths.sum())
    rows = []
    for window_tokens in (tokens, tokens // 3):
        windows = list(
            packing_windows(
                split, seq_len=SEQ_LEN, seed=0, packing=True, window_tokens=window_tokens
            )
        )
        firsts = np.concatenate([window.ids[window.starts] for window in windows])
        assert sorted(firsts) == [1000 * number for number in range(29 * SHARDS)]
        rows.append(sum(window.packing.num_rows for window in windows))
    assert rows[0] <= rows[1] <= 1.05 * rows[0]


def test_blocks_hold_the_chosen_documents_in_order(tmp_path):
    split = split_of(tmp_path).without_rows(np.array([0, 30, 31], dtype=np.uint64))
    parts = list(blocks(split))
    ids = np.concatenate([part[0] for part in parts])
    lengths = np.concatenate([part[2] for part in parts])
    firsts = ids[np.cumsum(lengths) - lengths]
    wanted = [number for number in range(29 * SHARDS) if number not in (0, 30, 31)]
    assert firsts.tolist() == [1000 * number for number in wanted]
    assert split.rows_dropped == 3

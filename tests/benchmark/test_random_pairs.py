"""The random pairs of the benchmark, as our engine and as its peers take them."""

import itertools

import numpy as np

from workflow.benchmark.cases import load_benchmark, requests, step_rows
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.objectives.pairs import Pairs

PAIRS, SEQ_LEN, VOCAB = 23, 260, 101


def test_packed_rows_hold_every_pair_with_its_answers_trained():
    pairs = random_pairs(PAIRS, seq_len=SEQ_LEN, vocab_size=VOCAB)
    store = pair_rows(pairs, seq_len=SEQ_LEN)
    found = []
    for ids, mask, places in zip(store.input_ids, store.loss_mask, store.position_ids, strict=True):
        starts = [*np.flatnonzero(places == 0), SEQ_LEN]
        documents = [slice(*span) for span in itertools.pairwise(starts)]
        for first, second in zip(documents[::2], documents[1::2], strict=False):
            prompt = ids[first][~mask[first]]
            assert np.array_equal(prompt, ids[second][~mask[second]])
            found.append((prompt, ids[first][mask[first]], ids[second][mask[second]]))
    expected = [tuple(map(bytes, pair)) for pair in pairs]
    assert sorted(tuple(map(bytes, pair)) for pair in found) == sorted(expected)


def test_a_step_has_all_pairs():
    (request,) = requests(
        load_benchmark(
            {"benchmark": {"pairs": PAIRS, "seq_len": SEQ_LEN, "cases": ["dpo"], "processes": [1]}}
        ),
        num_gpus=0,
    )
    store = pair_rows(random_pairs(PAIRS, seq_len=SEQ_LEN, vocab_size=VOCAB), seq_len=SEQ_LEN)
    assert step_rows(request.sizes, processes=1) == store.num_rows
    sizes = Pairs(losses=lambda c, r: c.ratio, rewards=lambda a: a.ratio).step_sizes(
        store, np.arange(store.num_rows)
    )
    assert sizes == (
        PAIRS,
        sum(len(p.chosen) for p in random_pairs(PAIRS, seq_len=SEQ_LEN, vocab_size=2)),
    )

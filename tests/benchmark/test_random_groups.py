"""The random groups of the benchmark, as our engine and as its peers take them."""

import itertools

import numpy as np

from workflow.benchmark.cases import load_benchmark, requests, step_rows
from workflow.benchmark.random_groups import ANSWERS, answer_tokens, group_rows, random_groups
from workflow.lib.kernels.attention.answer_rows import kept_tokens

GROUPS, SEQ_LEN, VOCAB = 3, 101, 53


def test_rows_hold_the_answers_of_a_group_with_what_its_loss_reads():
    groups = random_groups(GROUPS, seq_len=SEQ_LEN, vocab_size=VOCAB)
    store = group_rows(groups, seq_len=SEQ_LEN)
    found = []
    for row in range(store.num_rows):
        starts = np.flatnonzero(store.position_ids[row] == 0)
        for start, stop in itertools.pairwise(starts):  # the last is padding
            span = slice(start, stop)
            ids, trained = store.input_ids[row, span].tolist(), store.loss_mask[row, span]
            (advantage,) = {*store.optional["advantages"][row, span].tolist()}
            found.append((ids, int(trained.argmax()), round(advantage, 5)))
    expected = [
        ([*group.prompt, *answer.ids], len(group.prompt), round(np.float32(answer.advantage), 5))
        for group in groups
        for answer in group.answers
    ]
    assert sorted(found) == sorted(expected)


def test_a_step_has_all_groups_and_their_prompts_can_be_shared():
    sizes = {"groups": GROUPS, "seq_len": SEQ_LEN, "cases": ["grpo"], "processes": [1]}
    (request,) = requests(load_benchmark({"benchmark": sizes}), num_gpus=0)
    store = group_rows(random_groups(GROUPS, seq_len=SEQ_LEN, vocab_size=VOCAB), seq_len=SEQ_LEN)
    assert step_rows(request.sizes, processes=1) == store.num_rows == GROUPS
    kept = kept_tokens(store.input_ids, store.position_ids, store.loss_mask, paired=False)
    prompt, answer = SEQ_LEN // 12, answer_tokens(SEQ_LEN)
    # each later answer keeps the last token of the prompt
    assert kept.sum(axis=1).tolist() == [prompt + ANSWERS * answer + ANSWERS - 1] * GROUPS

"""Tokens folders of groups: rows hold the sampled answers with their prompts, and what belongs to
each token."""

import pytest

from tests.support.tokenizing import documents_of
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.group_rows import Answer, Group, write_groups
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore, recorded_arrays
from workflow.lib.system.checksums import findings
from workflow.lib.system.errors import UserError

SEQ_LEN = 17


def answer(first, tokens, advantage):
    return Answer(
        ids=range(first, first + tokens),
        log_probs=[-first - n / 8 for n in range(tokens)],
        advantage=advantage,
    )


GROUPS = [
    Group(
        prompt=[20, 21, 22],
        answers=[answer(30, 2, 0.5), answer(40, 4, -1.0), answer(50, 1, 0.25), answer(60, 3, 0.25)],
        file="prompts.jsonl",
        row=4,
    ),
    Group(
        prompt=[23, 24, 25, 26, 27],
        answers=[answer(70, 3, 1.5), answer(75, 3, -1.5)],
        file="prompts.jsonl",
        row=7,
    ),
]
DOCUMENTS = [(group.prompt, answer) for group in GROUPS for answer in group.answers]


@pytest.fixture
def texts(stage):
    stage.run()
    return stage.output


def write(folder, texts, tokenizer_folder, *, groups=GROUPS, seq_len=SEQ_LEN):
    folder.mkdir()
    tokenizer = load_tokenizer(tokenizer_folder)
    write_groups(folder, groups, texts=texts, seq_len=seq_len, seed=0, tokenizer=tokenizer)
    return TokenStore.open(folder)


@pytest.fixture
def store(tmp_path, texts, tokenizer_folder):
    return write(tmp_path / "groups", texts, tokenizer_folder)


def test_each_answer_is_trained_as_sampled_after_its_prompt(store):
    expected = {
        (*prompt, *answer.ids): [False] * len(prompt) + [True] * len(answer.ids)
        for prompt, answer in DOCUMENTS
    }
    assert documents_of(store) == expected


def test_tokens_have_the_advantage_of_their_answer_and_the_sampler_s_log_p(store):
    advantages = documents_of(store, of=store.optional["advantages"])
    log_probs = documents_of(store, of=store.optional["sampled_log_probs"])
    for prompt, answer in DOCUMENTS:
        key = (*prompt, *answer.ids)
        assert advantages[key] == [answer.advantage] * len(key)
        assert log_probs[key] == [0.0] * len(prompt) + answer.log_probs


def test_answers_to_a_prompt_are_neighbours_in_as_few_rows_as_hold_them(store):
    contents = sorted(
        [int(first) for first in ids[positions == 0] if first]
        for ids, positions in zip(store.input_ids, store.position_ids, strict=True)
    )
    assert contents == [[20], [20, 20, 20], [23, 23]]


def test_folder_keeps_held_out_documents_and_is_as_its_manifest_says(
    tmp_path, store, texts, tokenizer_folder
):
    before = TokenStore.open(texts).heldout_documents()
    after = store.heldout_documents()
    assert [ids.tolist() for ids, _ in after] == [ids.tolist() for ids, _ in before]
    manifest = read_record(tmp_path / "groups" / MANIFEST, Manifest)
    assert (manifest.examples, manifest.seq_len) == ("groups", SEQ_LEN)
    train = manifest.splits.train
    assert (train.rows_read, train.documents, train.trained_tokens) == (2, 6, 16)
    assert [group.documents for group in train.lengths]
    assert [origin.answer for origin in manifest.sample_origins] == [
        "advantage +0.5",
        "advantage -1",
        "advantage +1.5",
        "advantage -1.5",
    ]
    assert not any(findings(recorded_arrays(tmp_path / "groups", store.manifest)))


def test_too_long_answer_names_the_settings(tmp_path, texts, tokenizer_folder):
    with pytest.raises(UserError, match=r"data.seq_len = 7: .* 8 tokens.*answers.max_new_tokens"):
        write(tmp_path / "groups", texts, tokenizer_folder, seq_len=7)

"""The shipped texts of other kinds than the training data."""

from collections import Counter

import numpy as np
import pytest

from tests.support.tiny import EOS, tiny_tokenizer
from workflow.lib.evaluation.other_texts import FOLDER, OtherTexts

KINDS = {"prose": 15, "code": 14, "chat": 14}


@pytest.fixture
def tokenizer(tmp_path):
    return tiny_tokenizer(tmp_path)


def encoded(tokenizer, **changes):
    return OtherTexts.of(tokenizer, **{"seq_len": 8192, "usable_tokens": len(tokenizer)} | changes)


def kinds(texts):
    return dict(Counter(texts.kinds))


def test_texts_are_small_and_enough_for_an_interval(tokenizer):
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < 60_000
    texts = encoded(tokenizer)
    assert kinds(texts) == KINDS
    assert len({ids.tobytes() for ids, _ in texts.documents}) == sum(KINDS.values())


def test_whole_texts_and_the_answers_of_chats_are_scored(tokenizer):
    for (ids, mask), kind in zip(*vars(encoded(tokenizer)).values(), strict=True):
        scored = tokenizer.decode(ids[mask])
        if kind == "chat":
            assert "<|user|>" in tokenizer.decode(ids[~mask])
            assert scored.endswith(EOS)
            assert "<|user|>" not in scored
        else:
            assert mask[1:].all()
            assert EOS not in scored, "a passage has no end"


def test_chats_have_no_system_prompt(tokenizer):
    assert not any("<|system|>" in tokenizer.decode(ids) for ids, _ in encoded(tokenizer).documents)


BROKEN = "{{ raise_exception('tools only') }}"


@pytest.mark.parametrize("template", [None, BROKEN])
def test_model_without_a_template_that_writes_chats_gets_none(tokenizer, template):
    tokenizer.chat_template = template
    assert kinds(encoded(tokenizer)) == {"prose": KINDS["prose"], "code": KINDS["code"]}


def test_documents_are_cut_to_the_length_that_was_trained(tokenizer):
    whole, cut = encoded(tokenizer), encoded(tokenizer, seq_len=300)
    assert len(cut.documents) == len(whole.documents)
    for (ids, mask), (longer, its_mask) in zip(cut.documents, whole.documents, strict=True):
        assert np.array_equal(ids, longer[:300])
        assert np.array_equal(mask, its_mask[:300])
    assert "chat" not in kinds(encoded(tokenizer, seq_len=5)), "no token of an answer is left"

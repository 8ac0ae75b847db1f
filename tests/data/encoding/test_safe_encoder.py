"""Data is never a special token: its text comes back whole, for any kind of tokenizer."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.encoding import encode, exchange, trained
from tests.support.tiny import ROLES, TEXTS

HOSTILE = ["<|end|>", "<|assistant|>", "a<|pad|>b", "<|user|><|begin|>", "<|end|", "<<|end|>>"]


PIECES = st.sampled_from([*HOSTILE, *ROLES, "a", " ", "\n", "é", "五", "<", "|>", "\U000f0000"])
CONTENTS = st.lists(PIECES, min_size=1, max_size=8).map("".join)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
@given(question=CONTENTS, answer=CONTENTS)
def test_any_text_comes_back_whole(tokenizer, question, answer):
    encoded = encode(tokenizer, exchange(question, answer))
    assert trained(tokenizer, encoded) == [answer + "<|end|>"]
    expected = f"<|begin|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
    assert tokenizer.decode(encoded.ids.tolist()) == expected


LLAMA_2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' "
    "[/INST]' }}{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% "
    "endif %}{% endfor %}"
)


def sentencepiece_like(kind, prepend_scheme):
    """Special tokens in the model's own vocabulary, and spaces written as part of the words."""
    specials = ["<unk>", "<s>", "</s>"]
    common: dict[str, Any] = {"vocab_size": 151, "special_tokens": specials, "show_progress": False}
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(unk_token="<unk>", **common)
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(**common)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    core.train_from_iterator([*TEXTS, "[INST] </s> [/INST]"] * 3, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("prepend_scheme", ["first", "always", "never"])
def test_special_token_in_the_data_is_ordinary_text_for_sentencepiece_too(kind, prepend_scheme):
    tokenizer = sentencepiece_like(kind, prepend_scheme)
    harmless = exchange("What is the fox?", "the dog")
    hostile = exchange("What </s> is <s> the fox?", "the dog")
    first, second = (encode(tokenizer, chat, LLAMA_2_TEMPLATE) for chat in (harmless, hostile))
    own = tokenizer.apply_chat_template(harmless, chat_template=LLAMA_2_TEMPLATE)["input_ids"]
    specials = [[i for i in e.ids.tolist() if i in (1, 2)] for e in (first, second)]
    assert first.ids.tolist() == own
    assert specials == [[1, 2], [1, 2]]
    assert trained(tokenizer, first) == trained(tokenizer, second)


@pytest.mark.parametrize("prepend_scheme", ["first", "always", "never"])
def test_answer_behind_a_prompt_that_ends_with_a_blank_is_what_a_model_would_add(prepend_scheme):
    """Encoded as one text, the blank would belong to the answer's first word, which inference has
    it not do."""
    tokenizer = sentencepiece_like("bpe", prepend_scheme)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + '[/INST] ' "
        "if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    )
    talk = exchange("the fox", "the dog")
    encoded = encode(tokenizer, talk, template)
    prompt = tokenizer.apply_chat_template(talk[:1], chat_template=template)["input_ids"]
    assert encoded.ids[: len(prompt)].tolist() == prompt
    assert encoded.mask.tolist() == [False] * len(prompt) + [True] * (
        len(encoded.ids) - len(prompt)
    )
    text = "".join(tokenizer.convert_ids_to_tokens(encoded.ids[len(prompt) :].tolist()))
    assert text == "the▁dog</s>"

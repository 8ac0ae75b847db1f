"""Data is never a special token: its text comes back whole, for any kind of tokenizer."""

import subprocess
import sys
from itertools import count, islice
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.encoding import encode, exchange, trained
from tests.support.tiny import ROLES, TEXTS
from workflow.lib.data.encoding.safe_encoder import PIECE_CHARS, encoding
from workflow.lib.system.errors import UserError


def byte_level(*, trim):
    """Parts of characters as tokens; with `trim`, offsets leave out the blanks that a token begins
    with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=trim)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the fox  the answer é"] * 9, trainer)
    return tokenizer


def metaspace():
    """As SentencePiece does: text is normalized, which changes its length, and a blank put before
    it."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(["the fox  the answer e"] * 9, trainer)
    return tokenizer


def without_words():
    """As Gemma's: one word is the whole text."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(["the fox  the answer e"] * 9, trainer)
    return tokenizer


def grouped_digits():
    """Digits in threes from the right, which looks ahead to the end of a number."""
    tokenizer = byte_level(trim=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}(?=(\p{N}{3})*(?!\p{N}))"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level(trim=False),
    "trimmed": byte_level(trim=True),
    "normalized": metaspace(),
    "without words": without_words(),
    "grouped digits": grouped_digits(),
}
WORDS = [
    "the",
    "fox",
    "answer",
    "don't",
    "7",
    "1234567890" * 3,
    "x" * 40,
    "é",
    "e\u0301",
    "五五。",
    "🦊",
    "--",
]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", ", ", ". "]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("the fox  éﬁİ\u0323\u0307五🦊\n\t"), max_size=30),
    ends=st.tuples(st.integers(0, 31), st.integers(0, 31)),
)
def test_first_token_is_the_one_that_begins_at_the_character_or_behind_it(kind, text, ends):
    offsets = TOKENIZERS[kind].encode(text, add_special_tokens=False).offsets
    encoded = encoding(TOKENIZERS[kind], text)
    start, end = sorted(ends)
    first = encoded.first_from(start)
    assert first == sum(begin < start for begin, _ in offsets)
    assert encoded.first_from(end, lo=first) == sum(begin < end for begin, _ in offsets)


def test_panic_of_a_tokenizer_is_an_error_that_names_the_text():
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.normalizer = normalizers.Replace(Regex("(x+x+)+y"), "")
    with pytest.raises(UserError, match=r"tokenizer fails \(PanicException: .*begins with 'xxx"):
        encoding(tokenizer, "x" * 60)


def long_text(blanks, *, length):
    draw = Random(0)
    parts = (draw.choice(WORDS) + draw.choice(blanks) for _ in count())
    text = ""
    while len(text) < length:
        text += "".join(islice(parts, 1000))
    return text


@pytest.mark.parametrize("blanks", [BLANKS, [""]], ids=["words", "no blank"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_of_a_long_text_are_those_of_the_whole(kind, blanks):
    text = long_text(blanks, length=9 * PIECE_CHARS // 4)
    whole = TOKENIZERS[kind].encode(text, add_special_tokens=False)
    encoded = encoding(TOKENIZERS[kind], text)
    assert encoded.ids.tolist() == whole.ids
    assert [encoded.span(number) for number in range(len(whole.ids))] == whole.offsets


MEMORY = """
import resource, sys
from tokenizers import Tokenizer
from workflow.lib.data.encoding.safe_encoder import encoding

def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

tokenizer, text = Tokenizer.from_file(sys.argv[1]), "the answer, don't fox\\n" * 60_000
encoding(tokenizer, text[:1000])
before = peak_bytes()
tokens = len(encoding(tokenizer, text).ids)
print((peak_bytes() - before) / tokens)
"""


def test_memory_of_a_long_text_is_that_of_its_tokens_and_of_a_piece(tmp_path):
    """The library alone takes 300 bytes for each of these 500,000 tokens, pieces 40."""
    TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "tokenizer.json")]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(child.stdout) < 100


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

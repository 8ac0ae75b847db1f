"""Tokens and their places in a text; those of a long text are the whole's, in bounded memory."""

import subprocess
import sys
from itertools import count, islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from workflow.lib.data.encoding.text_encoding import PIECE_CHARS, encoding
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
from workflow.lib.data.encoding.text_encoding import encoding

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

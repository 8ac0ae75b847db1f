"""Chats longer than a row: each part has the system text, and begins with a question."""

from itertools import pairwise

import pytest

from tests.support.encoding import PLAIN_TEMPLATE, conversation
from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.encoding.row_formats import Weighted
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.tokens.divided_chats import divide_chat
from workflow.lib.data.tokens.overlong import TooLongError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


SYSTEM = {"role": "system", "content": "Be brief."}


def chat(count, *, longest=9):
    turns = []
    for number in range(count):
        answer = f"Answer {number}." + " so" * (number % longest)
        turns += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": answer},
        ]
    return [SYSTEM, *turns]


def divided(tokenizer, messages, *, seq_len=150, loss_on="completions", weight=None, **more):
    encoder = SampleEncoder(tokenizer, chat_template=PLAIN_TEMPLATE, loss_on=loss_on)
    sample = conversation(messages, **more)
    sample = sample if weight is None else Weighted(sample, weight)
    return divide_chat(encoder, sample, seq_len=seq_len, last_turn=loss_on == "last_turn")


def shown(tokenizer, document):
    return tokenizer.decode(document.ids.tolist())


def test_every_turn_is_trained_once_behind_the_system_text_and_its_question(tokenizer):
    documents = divided(tokenizer, chat(30))
    texts = [shown(tokenizer, document) for document in documents]
    assert len(texts) > 2
    assert all(len(document.ids) <= 150 for document in documents)
    assert all(text.count("Be brief.") == 1 for text in texts)
    for number in range(30):
        (host,) = [text for text in texts if f"Answer {number}." in text]
        assert f"Question {number}?" in host


def test_parts_are_as_long_as_fits(tokenizer):
    documents = divided(tokenizer, chat(30))
    whole = divided(tokenizer, chat(30), seq_len=10_000)
    assert len(whole) == 1
    lengths = [len(document.ids) for document in documents]
    assert all(a + b > 150 for a, b in pairwise(lengths))


def test_turns_between_two_questions_stay_together(tokenizer):
    messages = [m for n, turn in enumerate(chat(9)) for m in ((turn, turn) if n % 2 else (turn,))]
    parts = divided(tokenizer, messages, seq_len=90)
    assert len(parts) > 2
    assert all(shown(tokenizer, part).count("<|user|>") % 2 == 0 for part in parts)


def test_question_whose_answers_do_not_fit_is_refused_with_the_length_that_does(tokenizer):
    messages = chat(3)
    messages[4]["content"] = "long " * 200
    with pytest.raises(TooLongError, match=r"message 4 and its answers have (\d+) .*seq_len: \1 "):
        divided(tokenizer, messages)


def test_only_the_last_turn_is_trained_where_settings_say_so(tokenizer):
    documents = divided(tokenizer, chat(30), loss_on="last_turn")
    assert len(documents) == 1
    assert "Answer 29." in shown(tokenizer, documents[0])


def test_untrained_turns_make_no_document_and_weights_stay(tokenizer):
    weights = [0.0, *([0.0, 0.0] * 15), *([0.0, 0.5] * 15)]
    messages = chat(30)
    documents = divided(tokenizer, messages, weights=weights, weight=2.0)
    assert all(document.weights.max() == 1.0 for document in documents if document.mask.any())

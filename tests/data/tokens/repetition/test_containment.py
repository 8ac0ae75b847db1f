"""Held-out rows whose trained text is trained, among relatives that only look alike."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.token_splits import Turn, Words, split_of
from workflow.lib.data.tokens.repetition.containment import find_contained, shared_tokens

Rows = list[tuple[Turn, ...]]
VOCABULARY = [f"w{number}" for number in range(3000)]


class Writer:
    """Draws texts of words."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def text(self, words: int) -> str:
        return " ".join(self._draw.choices(VOCABULARY, k=words))

    def rows(self, count: int, *, question: int = 9, answer: int = 40) -> Rows:
        return [((self.text(question), self.text(answer)),) for _ in range(count)]


def found(folder, train, heldout, *, threshold=0.5, **settings):
    folder.mkdir(exist_ok=True)
    words = Words()
    splits = [
        split_of(folder, name, [words.conversation(*row) for row in rows])
        for name, rows in (("heldout", heldout), ("train", train))
    ]
    pieces = words.pieces
    return find_contained(*splits, pieces=pieces, threshold=threshold, processes=1, **settings)


def with_word(text, number, word):
    words = text.split()
    return " ".join([*words[:number], word, *words[number + 1 :]])


def same_answer_other_question(w):
    answer = w.text(30)
    return [((w.text(9), answer),)], [((w.text(9), answer),)]


def one_word_of_the_answer_differs(w):
    question, answer = w.text(9), w.text(30)
    return [((question, answer),)], [((question, with_word(answer, 20, "2024")),)]


def short_answer_and_its_question(w):
    question = w.text(9)
    return [((question, "yes"),)], [((question, "yes"),)]


def short_answer_and_question_after_other_context(w):
    """Both contexts stand in more rows."""
    shots, question = [w.text(90), w.text(90)], w.text(12)
    others: Rows = [((f"{shot} {w.text(12)}", "no"),) for shot in shots for _ in range(4)]
    return ([((f"{shots[0]} {question}", "yes"),), *others], [((f"{shots[1]} {question}", "yes"),)])


def one_word_of_a_long_question_differs(w):
    question = w.text(120)
    return [((question, "spam"),)], [((with_word(question, 30, "2024"), "spam"),)]


def question_of_common_context_alone(w):
    row: tuple[Turn, ...] = ((w.text(9), "yes"),)
    return [row] * 4, [row]


def beginning_of_a_longer_conversation(w):
    turns = [(w.text(6), w.text(9)) for _ in range(5)]
    return [tuple(turns)], [tuple(turns[:2])]


def end_of_a_shorter_conversation(w):
    turns = [(w.text(6), w.text(9)) for _ in range(5)]
    return [tuple(turns[:1])], [tuple(turns)]


def all_beginnings_of_a_conversation(w):
    turns = [(w.text(6), w.text(30)) for _ in range(12)]
    return [tuple(turns[:n]) for n in range(2, 13)], [tuple(turns[:1])]


def one_paragraph_of_a_long_answer(w):
    paragraph = w.text(200)
    return [((w.text(9), paragraph),)], [((w.text(9), f"{w.text(600)} {paragraph}"),)]


@pytest.mark.parametrize(
    "relative",
    [
        same_answer_other_question,
        one_word_of_the_answer_differs,
        short_answer_and_its_question,
        short_answer_and_question_after_other_context,
        one_word_of_a_long_question_differs,
        question_of_common_context_alone,
        beginning_of_a_longer_conversation,
        end_of_a_shorter_conversation,
        all_beginnings_of_a_conversation,
        one_paragraph_of_a_long_answer,
    ],
)
@pytest.mark.parametrize("others", [4, 60])
def test_trained_text_is_found(tmp_path, relative, others):
    writer = Writer()
    train, heldout = relative(writer)
    more = writer.rows(others)
    assert [m.heldout for m in found(tmp_path, [*more, *train], [*writer.rows(2), *heldout])] == [2]


def same_question_other_answer(w):
    question = w.text(60)
    return [((question, w.text(30)),)], [((question, w.text(30)),)]


def same_question_other_label(w):
    question = w.text(60)
    return [((question, "yes"),)], [((question, "no"),)]


def labels_that_repeat(w):
    asked = "Is it so? Answer with one word, yes or no, and with nothing else at all, please."
    rows: Rows = [((f"{w.text(12)} {asked}", answer),) for answer in ("yes", "no") * 8]
    return rows[:12], rows[12:]


def refusals_that_repeat(w):
    refusal = w.text(26)
    rows: Rows = [((w.text(9), refusal),) for _ in range(12)]
    return rows[:10], rows[10:]


def few_refusals(w):
    refusal = "I am sorry, but I cannot help with that."
    rows: Rows = [((w.text(9), refusal),) for _ in range(4)]
    return rows[:2], rows[2:]


def header_of_examples(w):
    header = w.text(200)
    rows: Rows = [((f"{header} {w.text(9)}", "42"),) for _ in range(20)]
    return rows[:18], rows[18:]


def passage_of_three_rows(w):
    passage = w.text(200)
    rows: Rows = [((f"{passage} {w.text(9)}", "yes"),) for _ in range(3)]
    return rows[:2], rows[2:]


def passage_of_two_rows(w):
    passage = w.text(100)
    rows: Rows = [((f"{passage} {w.text(9)}", "yes"),) for _ in range(2)]
    return rows[:1], rows[1:]


def greeting_of_long_conversations(w):
    greeting = ("Hi", "Hello! What can I do for you?")
    rows: Rows = [(greeting, (w.text(9), w.text(90))) for _ in range(3)]
    return [(greeting,), *rows[:2]], rows[2:]


@pytest.mark.parametrize(
    "relative",
    [
        same_question_other_answer,
        same_question_other_label,
        labels_that_repeat,
        refusals_that_repeat,
        few_refusals,
        header_of_examples,
        passage_of_three_rows,
        passage_of_two_rows,
        greeting_of_long_conversations,
    ],
)
@pytest.mark.parametrize("others", [4, 60])
def test_what_only_looks_alike_is_left(tmp_path, relative, others):
    writer = Writer()
    train, heldout = relative(writer)
    assert found(tmp_path, [*writer.rows(others), *train], heldout) == []


def test_a_match_names_the_row_that_trains_most(tmp_path):
    writer = Writer()
    parts = [writer.text(40) for _ in range(3)]
    heldout: Rows = [tuple((writer.text(9), part) for part in parts)]
    train: Rows = [
        ((writer.text(9), parts[0]),),
        ((writer.text(9), parts[1]), (writer.text(9), parts[2])),
    ]
    (match,) = found(tmp_path, [*writer.rows(30), *train], heldout)
    assert (match.heldout, match.train, match.share) == (0, 31, pytest.approx(82 / 123))


def test_threshold_is_the_resemblance_of_documents_of_one_length(tmp_path):
    writer = Writer()
    half = writer.text(40)  # of 60 words: resemblance 1 / 2
    train: Rows = [((writer.text(9), f"{half} {writer.text(20)}"),), *writer.rows(30)]
    heldout: Rows = [((writer.text(9), f"{writer.text(20)} {half}"),)]
    assert len(found(tmp_path / "a", train, heldout, threshold=0.45)) == 1
    assert found(tmp_path / "b", train, heldout, threshold=0.55) == []


def test_same_rows_are_found_however_few_keys_are_in_memory(tmp_path):
    writer = Writer()
    rows = writer.rows(60)
    train = [*rows[:40], *(((writer.text(9), row[0][1]),) for row in rows[40:])]
    at_once = found(tmp_path / "a", train, rows)
    assert [match.heldout for match in at_once] == list(range(60))
    assert found(tmp_path / "b", train, rows, keys_at_once=100) == at_once


def test_long_answers_are_found_by_a_sample_of_them(tmp_path):
    writer = Writer()
    train = writer.rows(20, answer=1500)
    heldout: Rows = [((writer.text(9), " ".join(row[0][1].split()[:900])),) for row in train]
    assert len(found(tmp_path, train, [*heldout, *writer.rows(9, answer=1500)])) == 20


def test_documents_of_one_corpus_are_told_apart(tmp_path):
    writer, words = Writer(), Words()
    rows = writer.rows(30)
    rows += [((writer.text(9), row[0][1]),) for row in rows[:9]]
    whole = split_of(tmp_path, "all", [words.conversation(*row) for row in rows])
    heldout = replace(whole, chosen=np.array([2, 5, 11, 33, 36], dtype=np.uint32))
    train = replace(whole, chosen=np.setdiff1d(whole.chosen, heldout.chosen))
    matches = find_contained(heldout, train, pieces=words.pieces, threshold=0.5, processes=1)
    assert [(m.heldout, m.train) for m in matches] == [(2, 32), (5, 35), (33, 3), (36, 6)]


def test_quoted_are_the_first_shared_words(tmp_path):
    writer, words = Writer(), Words()
    shared = writer.text(60)
    documents = [
        words.conversation((writer.text(9), f"{writer.text(30)} {shared}")) for _ in range(2)
    ]
    quoted = shared_tokens(*documents, pieces=words.pieces)
    ids = documents[0][0]
    assert ids[quoted].tolist() == ids[-61:][: quoted.stop - quoted.start].tolist()


def test_a_short_answer_is_quoted_with_its_question():
    words = Words()
    document = words.conversation(("Is seven a prime number ?", "yes"))
    assert shared_tokens(document, document, pieces=words.pieces).start == 0

"""Counts of sampled answers, before they are sampled."""

from workflow.lib.kernels.attention.answer_rows import RowCounts
from workflow.lib.planning.token_counts import TokenCounts


def test_answers_have_the_prompts_of_the_rows_and_their_longest_length():
    """10 rows of 100 tokens hold 50 documents: 8 trained tokens each, 12 of prompts and padding."""
    rows = TokenCounts(100, 50, 7, packed_rows=10, trained_tokens=400, documents=50)
    counts = rows.with_answers(30, answer_tokens=18)
    assert (counts.packed_rows, counts.trained_tokens, counts.documents) == (9, 540, 30)
    assert (counts.seq_len, counts.heldout_tokens) == (100, 7)
    assert rows.with_answers(3, answer_tokens=999).packed_rows == 3  # none is longer than a row


def test_answers_of_one_prompt_share_it():
    """A row holds a prompt of 12 tokens with 3 answers of 18: 30 + 19 + 19 tokens, and padding."""
    rows = TokenCounts(100, 50, 7, packed_rows=10, trained_tokens=400, documents=50)
    shared = rows.with_answers(30, answer_tokens=18, per_prompt=3).answer_rows
    assert shared.rows == (RowCounts(tokens=100, documents=4, prompt_keys=22, trained=54),)
    assert shared.largest == (100, 4, 22, 100)
    assert shared.copies == 2
    assert rows.with_answers(30, answer_tokens=18).answer_rows is None

"""Counts of sampled answers, before they are sampled."""

from workflow.lib.planning.token_counts import TokenCounts


def test_answers_have_the_prompts_of_the_rows_and_their_longest_length():
    """10 rows of 100 tokens hold 50 documents: 8 trained tokens each, 12 of prompts and padding."""
    rows = TokenCounts(100, 50, 7, packed_rows=10, trained_tokens=400, documents=50)
    counts = rows.with_answers(30, answer_tokens=18)
    assert (counts.packed_rows, counts.trained_tokens, counts.documents) == (9, 540, 30)
    assert (counts.seq_len, counts.heldout_tokens) == (100, 7)
    assert rows.with_answers(3, answer_tokens=999).packed_rows == 3  # none is longer than a row

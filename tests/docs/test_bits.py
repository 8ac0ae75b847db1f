"""The table and the figure of what 4 bits cost after training show the stored measurements."""

from tests.support.bits_page import written


def test_table_and_figure_are_what_was_measured():
    for path, text in written().items():
        shown = path.read_text(encoding="utf-8")
        assert shown == text, "`python -m tests.support.bits_page` mends it"

"""The table of benchmarks shows the stored measurements."""

from tests.support.benchmarks_page import TABLE, newest, table
from tests.support.measurements import all_lines


def test_table_is_what_was_measured():
    written = TABLE.read_text(encoding="utf-8")
    assert table(all_lines()) == written, "`python -m tests.support.benchmarks_page` mends it"


def test_newest_line_of_a_case_counts():
    line = next(line for line in all_lines() if line["measured"])
    earlier, later = dated(line, "2026-12-01T00:00:00Z"), dated(line, "2026-12-02T00:00:00Z")
    assert newest([later, earlier]) == [later]


def test_case_that_could_not_run_has_no_row():
    line = next(line for line in all_lines() if line["measured"])
    assert newest([dated(line, "2026-12-01T00:00:00Z") | {"measured": None}]) == []


def dated(line, date):
    return line | {"versions": line["versions"] | {"created_utc": date}}

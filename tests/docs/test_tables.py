"""Tables of the documents show what was measured, or what the engine gives now."""

import pytest

from tests.support import benchmarks_page, bits_page, families_page
from tests.support.benchmarks_page import newest
from tests.support.families import FAMILIES
from tests.support.families_page import measured_families
from tests.support.measurements import all_lines

WRITTEN = {
    "benchmarks_page": lambda: {benchmarks_page.TABLE: benchmarks_page.table(all_lines())},
    "bits_page": bits_page.written,
    "families_page": lambda: {families_page.TABLE: families_page.table()},
}


@pytest.mark.parametrize("page", WRITTEN)
def test_table_is_what_its_program_writes(page):
    for path, text in WRITTEN[page]().items():
        shown = path.read_text(encoding="utf-8")
        assert shown == text, f"`python -m tests.support.{page}` mends it"


def test_measured_families_are_those_with_measurements_of_gpus():
    measured = measured_families(all_lines())
    assert measured <= {*FAMILIES}
    assert "llama" in measured
    assert "deepseek_v3" not in measured


def test_family_that_only_a_peer_has_trained_on_a_gpu_is_not_called_measured():
    by_peer = [line for line in all_lines() if line["case"] == "qwen3_5_trl"]
    assert by_peer
    assert not measured_families(by_peer)


def test_newest_line_of_a_case_counts():
    line = next(line for line in all_lines() if line["measured"])
    earlier, later = dated(line, "2026-12-01T00:00:00Z"), dated(line, "2026-12-02T00:00:00Z")
    assert newest([later, earlier]) == [later]


def test_case_that_could_not_run_has_no_row():
    line = next(line for line in all_lines() if line["measured"])
    assert newest([dated(line, "2026-12-01T00:00:00Z") | {"measured": None}]) == []


def dated(line, date):
    return line | {"versions": line["versions"] | {"created_utc": date}}

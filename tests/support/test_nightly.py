"""The summary of all tests, and the files that it leaves to `make nightly`."""

from tests.support import nightly
from tests.support.suite import ALWAYS, MOST_S, OTHERS, read_table, table_of

TESTS = """
import os
import pytest

def test_right(): pass
def test_wrong(): assert os.environ["SUMS"] == "in no order"
def test_left_out(): pytest.skip("no GPU")

class TestGroup:
    def test_in_a_class(self): pass

@pytest.fixture
def broken(): raise ValueError
def test_whose_fixture_is_broken(broken): pass
"""
OPTIONS = ["-p", "tests.support.suite", "-p", "no:cacheprovider", "-c", "/dev/null"]


def test_outcomes_are_counted_and_failures_named(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_two.py").write_text("import nothing_of_this_name", encoding="utf-8")
    options = [*OPTIONS, "--continue-on-collection-errors", f"--rootdir={tmp_path}"]
    run = nightly.run_pytest([*options, str(tmp_path)], {"SUMS": "as they come"})
    assert (run["passed"], run["failed"], run["skipped"]) == (2, 3, 1)
    failed = [name.partition("::test_")[2] for name in run["failures"]]
    assert failed == ["whose_fixture_is_broken", "wrong", ""]
    assert run["files"].keys() == {OTHERS}
    assert run["seconds"] >= run["files"][OTHERS]  # rounded, both may be 0


def test_run_that_cannot_begin_has_failed():
    run = nightly.run_pytest([*OPTIONS, "--no-such-option"], {})
    assert (run["passed"], run["failed"]) == (0, 1)
    assert "status 4" in run["failures"][0]


def test_another_draw_changes_every_seed_that_torch_is_given(tmp_path):
    text = """
import torch
def test_draws():
    assert torch.manual_seed(3).initial_seed() == torch.initial_seed() == 7
    assert torch.random.manual_seed(4).initial_seed() == 8
    assert torch.Generator().manual_seed(3).initial_seed() == 7
"""
    (tmp_path / "test_one.py").write_text(text, encoding="utf-8")
    options = [*OPTIONS, f"--rootdir={tmp_path}", str(tmp_path)]
    assert nightly.run_pytest([*options, "--draw=4"], {})["failed"] == 0


def test_longest_files_are_slow_but_those_of_every_change():
    seconds = {"a.py": 50.0, ALWAYS[0]: 40.0, "b.py": 30.0, "c.py": 10.0, OTHERS: 10.0}
    rows = read_table(table_of(seconds))
    assert rows == {"a.py": "slow", ALWAYS[0]: "always", "b.py": "slow", "c.py": "slow"}


def test_what_is_left_takes_no_more_minutes_however_long_all_take():
    rows = read_table(table_of({"a.py": MOST_S, "b.py": MOST_S / 2, OTHERS: 9 * MOST_S}))
    assert rows == {"a.py": "slow", "b.py": "slow"}
    few = read_table(table_of({"a.py": MOST_S, "b.py": 1.0, OTHERS: 0.2 * MOST_S, "c.py": 9.0}))
    assert few == {"a.py": "slow", "b.py": "always", "c.py": "always"}

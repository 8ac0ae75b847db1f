"""The summary of all tests."""

import sys
from pathlib import Path

from tests.support import nightly

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


def test_outcomes_are_counted_and_files_timed(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    run = nightly.run_pytest([*options, str(tmp_path)], {"SUMS": "as they come"})
    assert (run["passed"], run["failed"], run["skipped"]) == (2, 2, 1)
    assert [*run["files"]] == ["test_one.py"]
    assert run["seconds"] > 0


def test_machine_names_what_computes() -> None:
    assert "torch" in nightly.machine()
    assert sys.version.split()[0] in nightly.machine()

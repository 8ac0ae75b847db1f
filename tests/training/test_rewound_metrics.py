"""Metrics of a resumed run: rewound to its checkpoint, whatever a kill left of the file."""

import pytest

from workflow.lib.artifacts.checkpoint_folder import damaged_line, rewind_metrics
from workflow.lib.system.checksums import checked_line, read_lines


def test_metrics_are_restored_from_the_checkpoints_own_copy(tmp_path):
    """After a power cut the lines written since may be lost, or all of them."""
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    copy.write_text("".join(checked_line(row) for row in METRICS))
    path.write_text("\0" * 50)
    assert rewind_metrics(path, step=4, source=copy) == METRICS[:3]
    assert read_lines(path) == METRICS[:3]


NAME = "of one\u2028source\x85"  # which Python's splitlines takes for ends of lines
METRICS = [{"step": step, "heldout_losses": {NAME: step / 7}} for step in (1, 2, 4, 6)]


@pytest.mark.parametrize("cut", ['{"step": 7, "lo', "", "\n", '{"step": 7'])
def test_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(checked_line(row) for row in METRICS) + cut)
    assert rewind_metrics(path, step=99) == METRICS


def test_lines_behind_a_cut_one_are_not_trusted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second, *others = (checked_line(row) for row in METRICS)
    path.write_text(first + second + '{"step": 3, "lo' + "".join(others))
    assert rewind_metrics(path, step=99) == METRICS[:2]


def test_lines_from_one_with_a_flipped_bit_are_not_trusted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = "".join(map(checked_line, METRICS))
    path.write_text(text.replace('"step": 4', '"step": 5'))
    assert rewind_metrics(path, step=99) == METRICS[:2]


LINES = [checked_line(row) for row in METRICS]
FILES = {
    "whole": ("".join(LINES), None),
    "cut by a kill": ("".join(LINES)[:-9], None),
    "flipped bit": ("".join(LINES).replace('"step": 4', '"step": 5'), 3),
    "zeros of a power cut": ("\0" * 50 + "\n", 1),
}


@pytest.mark.parametrize(("text", "line"), FILES.values(), ids=FILES)
def test_line_that_a_disk_changed_is_named_and_one_that_a_kill_cut_is_not(tmp_path, text, line):
    path = tmp_path / "metrics.jsonl"
    assert damaged_line(path) is None
    path.write_text(text)
    assert damaged_line(path) == line

"""Documents by length, drawn."""

import plotly.graph_objects as go
import pytest

from tests.support.report_examples import edit, write_run
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.report.length_figure import length_figure


@pytest.fixture
def path(tmp_path):
    write_run(tmp_path, "demo", num_steps=3)
    return tmp_path / "tokens" / "demo-data" / "manifest.json"


def test_every_split_is_drawn_in_shares_of_its_documents(path):
    figure = length_figure(read_record(path, Manifest), number=1)
    assert figure is not None
    go.Figure({"data": figure.data, "layout": figure.layout})  # raises on unknown properties
    assert [trace["name"] for trace in figure.data] == ["train", "held out"]
    assert [sum(trace["y"]) for trace in figure.data] == pytest.approx([1.0, 1.0])
    assert figure.data[0]["customdata"][1] == "65 to 128 tokens: 802"


def test_manifest_without_lengths_has_no_figure(path):
    for split in ("train", "heldout"):
        edit(path, lambda d, s=split: d["splits"][s].pop("length_histogram"))
    assert length_figure(read_record(path, Manifest), number=1) is None

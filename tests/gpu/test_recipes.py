"""The presets of `workflow/presets` on GPUs held to their memory: all layers, random weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.benchmark.cases import read_cases

pytestmark = pytest.mark.gpu

BENCHMARKS = Path("workflow/resources/benchmark")
RECIPES = read_cases(str(BENCHMARKS / "recipe_cases.yaml"))
ALLOCATED_ERROR = 0.005  # of the prediction


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_in_the_predicted_memory(name, tmp_path, request):
    count = int(name.rpartition("-")[2][0])
    request.getfixturevalue({1: "one_gpu", 2: "two_gpus"}[count])
    output = tmp_path / "measured.jsonl"
    options = {
        "--configfile": BENCHMARKS / f"recipes-{count}gpu.yaml",
        "--cases": name,
        "--bases": tmp_path / "bases",
        "--output": output,
    }
    words = [str(word) for option in options.items() for word in option]
    subprocess.run([sys.executable, "-m", "workflow.scripts.benchmark_run", *words], check=True)
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row["status"] == "measured", row["cause"]
    assert row["measured"]["graphs_off"] is None
    predicted, measured = row["predicted"], row["measured"]
    assert measured["allocated_bytes"] == pytest.approx(
        predicted["peak_bytes"], rel=ALLOCATED_ERROR
    )

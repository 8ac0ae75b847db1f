"""The benchmark's page: its numbers, ratios and causes are those of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.report_examples import provenance
from workflow.lib.artifacts.benchmark_record import BenchmarkRow
from workflow.lib.benchmark.cases import CHOICE
from workflow.lib.benchmark.measure import Observed, together
from workflow.lib.benchmark.page import benchmark_figure, page_name, render_page
from workflow.lib.settings.benchmark import BenchmarkConfig
from workflow.lib.system.artifact_files import write_lines

GIB = 2**30


def line(case: str, *, speed: float, processes: int = 2, **changes: Any) -> dict[str, Any]:
    """A line of a measurement on H200, as `benchmark_run` writes it."""
    sizes = BenchmarkConfig(model="meta-llama/Llama-2-70b-hf", layers=8, seq_len=2048)
    seen = Observed(
        step_s=[1 / speed if speed else 1.0],
        losses=[12.0092, 11.8641],
        grad_norms=[0.2116, 0.4534],
        allocated_bytes=int(5.5 * GIB),
        reserved_bytes=6 * GIB,
        host_bytes=3 * GIB,
        gemm_flops_per_s=734e12,
        attention="varlen",
    )
    measured = together([seen], tokens_per_step=1).as_json()
    return {
        "format_version": 1,
        "key": f"{case}-{processes}",
        "case": case,
        "title": f"what {case} is",
        "processes": processes,
        "settings": {},
        "peer": None,
        "status": "measured",
        "cause": None,
        "sizes": sizes.model_dump(mode="json", exclude=set(CHOICE)),
        "gpu_names": ["NVIDIA H200"],
        "measured": measured | {"model_flops_per_s": 551e12, "model_flops_utilisation": 0.7512},
        "predicted": {
            "peak_bytes": int(5.6 * GIB),
            "reserved_bytes": 6 * GIB,
            "phases": {},
            "terms": {},
            "host_bytes": GIB,
            "step_s": None,
            "tokens_per_s_per_process": None,
            "basis": "",
        },
        "provenance": provenance("benchmark_run")
        | {"created_utc": "2026-11-21T10:00:00Z", "commit": "abc"},
    } | changes


def row(case: str, *, speed: float, processes: int = 2, **changes: Any) -> BenchmarkRow:
    """The same line, read."""
    return read(line(case, speed=speed, processes=processes, **changes))


def read(document: dict[str, Any]) -> BenchmarkRow:
    return BenchmarkRow.model_validate_json(json.dumps(document))


OURS = row("flash", speed=12345.6)
PEER = row("trl_fsdp2", speed=10543.0, peer={"strategy": "fsdp2"}, predicted=None)
FOUR = row("flash", speed=12000.0, processes=4)
LOST = row(
    "ddp",
    speed=0.0,
    status="out_of_memory",
    cause="out of GPU memory: a | b",
    measured=None,
    predicted=None,
)
ROWS = [OURS, PEER, FOUR, LOST]


def test_page_is_named_by_model_hardware_and_date() -> None:
    assert page_name([OURS]) == "llama-2-70b-hf-8-layers_2xh200_2026-11-21"
    assert page_name(ROWS) == "llama-2-70b-hf-8-layers_2-4xh200_2026-11-21"
    sizes = OURS.sizes | {"layers": None, "memory_cap_gib": 23.0}
    capped = OURS.model_copy(update={"sizes": sizes})
    assert page_name([capped]) == "llama-2-70b-hf-capped-at-23-gib_2xh200_2026-11-21"


def test_row_of_the_table_shows_what_was_measured() -> None:
    expected = (
        "| `flash`: what flash is | 2 | varlen | 12,346 | 75.1 % | 5.50 GiB | 5.60 GiB | 6.00 GiB "
        "| 3.00 GiB "
        "| 12.0092 -> 11.8641 | 0.2116 -> 0.4534 |"
    )
    assert expected in render_page(ROWS, figure="x.png").splitlines()


def test_ratio_to_a_peer_is_of_as_many_processes() -> None:
    lines = render_page(ROWS, figure="x.png").splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("| times the peer's")]
    assert lines[head].endswith("| `trl_fsdp2 x2` |")
    assert {"| `flash x2` | 1.17, 1.00, 1.00 |", "| `flash x4` | - |"} <= set(lines[head:])


def test_weak_scaling_is_against_the_fewest_processes() -> None:
    assert "| `flash` | 2 -> 4 | 97.2 % |" in render_page(ROWS, figure="x.png")


def test_case_without_a_measurement_has_its_cause() -> None:
    expected = "| `ddp`: what ddp is | 2 | out of GPU memory: a \\| b |"
    assert expected in render_page(ROWS, figure="x.png").splitlines()


def test_largest_error_of_the_prediction_is_told() -> None:
    assert "at most +1.8% (`flash`), 2 cases" in render_page(ROWS, figure="x.png")


def test_size_of_a_case_of_its_own_is_told() -> None:
    longer = row("long", speed=1.0, sizes=OURS.sizes | {"seq_len": 4096})
    assert "`long`: what long is (seq_len 4096)" in render_page([OURS, FOUR, longer], figure="x")


def test_figure_has_a_row_per_measured_case() -> None:
    speed, memory = benchmark_figure(ROWS).axes
    assert [bar.get_width() for bar in speed.patches] == pytest.approx([12345.6, 10543.0, 12000.0])
    assert len(memory.patches) == 3 + 2  # no prediction of a peer
    assert [label.get_text() for label in speed.get_yticklabels()] == [
        "flash x2",
        "trl_fsdp2 x2",
        "flash x4",
    ]


def test_command_writes_page_and_figure(tmp_path: Path) -> None:
    write_lines(tmp_path / "m.jsonl", [row.as_json() for row in ROWS])
    done = forked_stage(
        "render_benchmark",
        *("--measurements", str(tmp_path / "m.jsonl"), "--output", str(tmp_path / "page")),
    )
    assert done.returncode == 0, done.stderr
    name = page_name(ROWS)
    pages = {path.name for path in (tmp_path / "page").iterdir()}
    assert pages == {f"{name}.md", f"{name}.png", "measurements.jsonl"}
    assert (tmp_path / "page" / f"{name}.png").stat().st_size < 300_000


def test_profile_says_where_the_time_of_a_step_goes() -> None:
    slow = line("slow", speed=1.0)
    slow["measured"]["profile"] = {
        "step_s": 0.25,
        "idle_s": 0.01,
        "kinds": {"products": 0.2, "attention": 0.0405},
        "kernels": [["nvjet", 0.2, 7]],
    }
    lines = render_page([OURS, read(slow)], figure="x").splitlines()
    assert "| one profiled step, ms | all | products | attention | GPU idle |" in lines
    assert "| `slow x2` | 250.0 | 200.0 | 40.5 | 10.0 |" in lines
    assert not any(line.startswith("| `flash x2` | ") and line.count("|") == 6 for line in lines)


def test_page_says_what_a_checkpoint_costs() -> None:
    """0.8 s every 50 steps of 0.25 s; one that cost less than nothing, by noise, cost nothing."""
    saving, quick = line("saving", speed=1.0), line("quick", speed=1.0)
    blocks = {"blocks_with_s": [13.3], "blocks_without_s": [12.5]}
    saving["measured"]["checkpoint"] = {
        "bytes": 2**30,
        "step_s": 0.25,
        "cost_s": 0.8,
        "still_s": 0.0625,
    } | blocks
    quick["measured"]["checkpoint"] = {
        "bytes": 2**20,
        "step_s": 0.25,
        "cost_s": -0.01,
        "still_s": 0.001,
    } | blocks
    lines = render_page([OURS, read(saving), read(quick)], figure="x").splitlines()
    assert "share of the time with one every 50 steps |" in next(
        x for x in lines if x.startswith("| checkpoints |")
    )
    assert "| `saving x2` | 1.00 GiB | 0.250 | 0.800 | 0.062 | 6.4 % |" in lines
    assert "| `quick x2` | 1 MiB | 0.250 | -0.010 | 0.001 | 0.0 % |" in lines
    assert not any("checkpoints |" in line for line in render_page(ROWS, figure="x").splitlines())


def test_case_without_its_cuda_graphs_says_why() -> None:
    without = line("flash", speed=1000.0)
    without["measured"]["graphs_off"] = "operation not permitted"
    page = render_page([read(without)], figure="x.png")
    assert "varlen, no CUDA graphs (operation not permitted)" in page

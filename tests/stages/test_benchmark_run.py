"""The benchmark from its settings to its page: cases, rows with a cause, and only what is missing
is measured.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.workflow_project import Project, make_project
from workflow.lib.artifacts.benchmark_record import BenchmarkRow
from workflow.lib.benchmark.cases import Request, read_cases, requests, run_settings
from workflow.lib.benchmark.measure import Observed, gemm_rate, together
from workflow.lib.benchmark.prediction import model_flops_per_token, prepare
from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.model.architecture.shipped_shapes import known_config
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.settings.config import load_benchmark
from workflow.lib.system.artifact_files import read_lines, write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.scripts import benchmark_run

TINY: dict[str, Any] = {
    "model": "model",
    "seq_len": 24,
    "steps": 3,
    "rank": 3,
    "device": "cpu",
    "cases": ["flash", "ddp"],
    "checkpoint_pairs": 2,
}


def wanted(**changes: Any) -> list[Request]:
    """Return the requests of settings that differ from the defaults so."""
    return requests(load_benchmark({"benchmark": changes}), num_gpus=0)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose benchmark of two cases, one of which cannot run, has been made."""
    made = make_project(tmp_path_factory.mktemp("benchmark"), benchmark=TINY)
    made.run("benchmark")
    return made


def rows(project: Project) -> dict[str, dict[str, Any]]:
    """Return the measurements by case."""
    (path,) = project.root.glob("results/benchmark/*/page/measurements.jsonl")
    return {row["case"]: row for row in read_lines(path)}


def test_measured_case_has_speed_losses_and_peaks(project: Project) -> None:
    row = rows(project)["flash"]
    found = row["measured"]
    assert row["status"] == "measured"
    assert len(found["losses"]) == len(found["grad_norms"]) == len(found["step_s"]) == 3
    assert all(norm > 0 for norm in found["grad_norms"])
    tokens = 2 * row["sizes"]["micro_batch_size"] * row["sizes"]["seq_len"]
    assert found["tokens_per_s_per_process"] == tokens / sum(found["step_s"][1:])
    assert found["host_bytes"] > 2**27
    assert found["bytes_read"] > 0
    assert all(check["passed"] for check in found["checks"])
    assert 0 < found["model_flops_utilisation"] < 1.5


def test_measured_case_tells_what_a_checkpoint_costs(project: Project) -> None:
    found = rows(project)["flash"]["measured"]["checkpoint"]
    assert len(found["blocks_with_s"]) == len(found["blocks_without_s"]) == 2
    assert found["step_s"] == statistics.median(found["blocks_without_s"]) / 3
    assert 0 < found["still_s"] < max(found["blocks_with_s"])
    shape, rank = shape_of_document(rows(project)["flash"]["shape"]), TINY["rank"]
    values = rank * shape.total(
        lambda layer: sum(x.in_features + x.out_features for x in layer.linears)
    )
    assert (
        3 * 4 * values < found["bytes"] < 2 * 3 * 4 * values
    )  # the adapter, its two moments; indices
    assert not list(project.root.glob("results/benchmark/**/*.checkpoints"))


def test_case_that_cannot_run_is_a_row_with_its_cause(project: Project) -> None:
    row = rows(project)["ddp"]
    assert row["status"] == "failed"
    assert "shard_size = 1: a model is sharded over at least 2 processes" in row["cause"]


def test_row_predicts_its_case_again_without_the_model(project: Project) -> None:
    row = rows(project)["flash"]
    shape = shape_of_document(row["shape"])
    setup = Setup(**(row["setup"] | {"targets": tuple(row["setup"]["targets"])}))
    assert predict(shape, setup).peak_bytes == row["predicted"]["peak_bytes"]


def test_page_shows_the_numbers_of_the_measurements(project: Project) -> None:
    (page,) = project.root.glob("results/benchmark/*/page/*.md")
    found = rows(project)["flash"]["measured"]
    text = page.read_text()
    assert page.name == f"model_2xcpu_{rows(project)['flash']['provenance']['created_utc'][:10]}.md"
    assert f"| {found['tokens_per_s_per_process']:,.0f} |" in text
    assert f"{found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}" in text
    assert page.with_suffix(".png").stat().st_size > 5000


def test_what_is_measured_is_not_measured_again(project: Project) -> None:
    assert project.planned("benchmark") == {}


def test_only_a_new_case_is_measured(project: Project) -> None:
    before = project.settings
    project.edit({"benchmark": {"cases": ["flash", "ddp", "shard_grad_op"]}})
    plan = project.plan("benchmark")
    project.write_settings(before)
    assert [job.wildcards["case"] for job in plan["benchmark_run"]] == ["shard_grad_op"]
    assert len(plan["render_benchmark"]) == 1


def test_unknown_case_is_one_message_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"benchmark.cases = 'flush': .* Did you mean flash"):
        wanted(cases=["flush"])


def test_unknown_shape_is_one_message_with_the_nearest_models() -> None:
    (request,) = wanted(cases=["flash"], model="meta-llama/Llama-2-70b-hg")
    with pytest.raises(UserError, match=r"benchmark.model = .*Did you mean .*Llama-2-70b-hf"):
        prepare(request, num_gpus=0)


def test_cap_without_a_gpu_is_refused() -> None:
    (request,) = wanted(cases=["flash"], memory_cap_gib=23.0)
    with pytest.raises(UserError, match=r"benchmark.memory_cap_gib = 23.0: it runs on the CPU"):
        prepare(request, num_gpus=0)


def test_more_processes_than_gpus_are_refused() -> None:
    (request,) = wanted(cases=["flash"], processes=[3])
    with pytest.raises(UserError, match=r"benchmark.processes = 3: this machine shows 2 GPU"):
        prepare(request, num_gpus=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": 9, "seq_len": 32}, (
            "documents = 9: a row of seq_len = 32 tokens holds at most 8"
        )),
        ({"processes": []}, "must be numbers of 1 to 4096"),
        ({"cases": []}, "there is nothing to measure"),
        ({"memory_cap_gib": 0}, "benchmark.memory_cap_gib = 0: must be above 0"),
    ],
)  # fmt: skip
def test_bad_size_is_one_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        wanted(**changes)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"title": 3}, "title = 3: must be text"),
        ({"title": "x", "benchmark": {"processes": [2]}}, (
            "benchmark.processes is not a case's own"
        )),
        ({"title": "x", "peer": {"strategy": "fsdp3"}}, "strategy"),
        ({"title": "x", "setting": {}}, "setting"),
    ],
)  # fmt: skip
def test_wrong_entry_of_a_list_of_cases_is_named(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"mine": entry}))
    with pytest.raises(UserError, match=f"case mine of .*\\s*.*{message}"):
        read_cases(str(tmp_path / "cases.yaml"))


def test_unknown_setting_of_a_case_names_the_case() -> None:
    request = Request.of(
        wanted(cases=["flash"])[0].document() | {"settings": {"train": {"fussed": 1}}}
    )
    with pytest.raises(UserError, match=r"case flash: .*train.fussed"):
        run_settings(request, device="cpu")


def test_every_shipped_case_but_ddp_has_settings_that_a_run_may_have() -> None:
    found = wanted(cases="all", peers=True, processes=[4])
    assert {request.name for request in found if request.peer} == {
        name for name in read_cases(None) if name.startswith("trl_")
    }
    for request in found:
        if request.name != "ddp":
            run_settings(request, device="cpu")


def test_peers_are_left_out_unless_asked_for() -> None:
    assert not any(request.peer for request in wanted(cases="all"))
    assert [request.name for request in wanted(cases=["trl_ddp"])] == ["trl_ddp"]


def test_every_case_is_measured_with_every_number_of_processes() -> None:
    labels = [request.label for request in wanted(cases=["flash", "sdpa"], processes=[2, 4])]
    assert labels == ["flash-x2", "flash-x4", "sdpa-x2", "sdpa-x4"]


def test_request_survives_its_document() -> None:
    (request,) = wanted(cases=["packed"], device="cpu")
    document = json.loads(json.dumps(request.document()))
    assert Request.of(document).document() == document
    assert Request.of(document).sizes.documents == 8


def test_model_work_of_a_token_by_hand() -> None:
    config = known_config("meta-llama/Llama-2-70b-hf")
    assert config is not None
    shape = describe_config(config | {"num_hidden_layers": 1}, origin=Path("x"))
    weights = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 32000 * 8192
    expected = 4 * weights + 6 * 512 * 8192
    assert model_flops_per_token(shape, seq_len=2048, documents=4) == expected


def test_cases_that_no_time_is_left_for_are_rows(tmp_path: Path) -> None:
    output = tmp_path / "measurements.jsonl"
    words = ["--cases", "flash", "trl_fsdp2", "--output", str(output), "--time-limit-s", "0"]
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    assert [row["cause"] for row in read_lines(output)] == ["not run: out of time"] * 2


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="the peer is installed")
def test_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path: Path) -> None:
    output = tmp_path / "measurements.jsonl"
    benchmark_run.main(
        benchmark_run.parser().parse_args(["--cases", "trl_fsdp2", "--output", str(output)])
    )
    (row,) = read_lines(output)
    assert row["status"] == "not_installed"
    assert row["cause"].startswith("not installed: trl")


def test_finished_case_is_kept_and_only_the_rest_is_tried(tmp_path: Path) -> None:
    output = tmp_path / "measurements.jsonl"
    words = ["--output", str(output), "--time-limit-s", "0", "--cases", "flash", "sdpa"]
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    first, second = read_lines(output)
    write_lines(output, [first | {"status": "measured", "cause": None}, second])
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    assert [row["status"] for row in read_lines(output)] == ["measured", "not_run"]


def test_one_start_measures_neighbours_that_are_alike_and_peers_alone() -> None:
    found = wanted(
        cases=["flash", "sdpa", "hsdp", "batch_1", "trl_ddp", "trl_fsdp2"], processes=[2]
    )
    names = {str(number): request for number, request in enumerate(found)}
    assert list(benchmark_run.starts(names, together=2)) == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert len(list(benchmark_run.starts(names, together=1))) == 6


def measured_at(speed: float) -> dict[str, Any]:
    """What workers write of a case of this speed."""
    seen = Observed(step_s=[1 / speed], gemm_flops_per_s=1e12)
    return together([seen], tokens_per_step=1).as_json()


def several(args: argparse.Namespace, asked: dict[str, Request]) -> Iterator[BenchmarkRow]:
    return benchmark_run.several(args, asked, partial(prepare, num_gpus=0), enough_time=True)


def speed_of(row: BenchmarkRow) -> float:
    assert row.measured is not None
    assert row.measured.model_flops_utilisation > 0
    return row.measured.tokens_per_s_per_process


def test_case_after_one_that_fails_is_measured_in_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that stop in the second of three cases have measured the first; the third gets a
    start of its own.
    """
    args = argparse.Namespace(output=tmp_path / "measurements.jsonl")
    failures = iter([UserError("out of GPU memory: x"), None])

    def launched(_: Any, ready: dict[str, Any]) -> UserError | None:
        left = benchmark_run.kept_folder(args)
        left.mkdir(exist_ok=True)
        write_checked_json(left / f"{next(iter(ready))}.json", measured_at(float(len(ready))))
        return next(failures)

    monkeypatch.setattr(benchmark_run, "launch", launched)
    asked = {
        found.name: found for found in wanted(cases=["flash", "sdpa", "batch_1"], device="cpu")
    }
    rows = {row.key: row for row in several(args, asked)}
    assert [rows[name].status for name in asked] == ["measured", "out_of_memory", "measured"]
    assert [speed_of(rows[name]) for name in ("flash", "batch_1")] == [3.0, 1.0]


def test_what_workers_had_measured_when_a_call_was_killed_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_run, "launch", lambda args, ready: UserError(" ".join(ready)))
    args = argparse.Namespace(output=tmp_path / "measurements.jsonl")
    benchmark_run.kept_folder(args).mkdir()
    write_checked_json(benchmark_run.kept_folder(args) / "flash.json", measured_at(7.0))
    asked = {found.name: found for found in wanted(cases=["flash", "sdpa"], device="cpu")}
    rows = {row.key: row for row in several(args, asked)}
    assert speed_of(rows["flash"]) == 7.0
    assert rows["sdpa"].cause == "sdpa", "it alone is started"


def test_rate_of_products_is_found_for_every_size() -> None:
    products = [[7, 5, 2], [5, 7, 1]]
    rate = gemm_rate(products, rows=3, dtype=torch.float32, device=torch.device("cpu"))
    assert 0 < rate < 1e13


def test_measurement_takes_the_largest_peaks_and_the_speed_of_all_later_steps() -> None:
    one = Observed(step_s=[9.0, 5.0, 1.0], reserved_bytes=5, host_bytes=1, gemm_flops_per_s=2.0)
    other = Observed(step_s=[9.0, 2.0, 4.0], reserved_bytes=3, host_bytes=8, gemm_flops_per_s=4.0)
    found = together([one, other], tokens_per_step=30)
    assert found.tokens_per_s_per_process == 30 / 3.0
    assert (found.reserved_bytes, found.host_bytes) == (5, 8)
    assert found.reserved_bytes_by_process == [5, 3]
    assert found.gemm_flops_per_s == 3.0

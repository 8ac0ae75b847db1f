"""The benchmark's command: lines with a measurement or a cause, and only what is missing is
measured."""

import argparse
import re
import subprocess
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tests.support.models import tiny_llama
from tests.support.plans import make_plan
from tests.support.preloaded_python import preloaded_python
from workflow.benchmark.cases import load_benchmark, requests
from workflow.benchmark.measure import Job, take_steps, together
from workflow.benchmark.prediction import prepare
from workflow.benchmark.record import Observed
from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.recording.recording_process import recording_process
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.checksums import read_lines, write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.scripts import benchmark_run

STEPS = 4
ROWS, SEQ_LEN = 2, 24


def wanted(**changes):
    """Return the requests of settings that differ from the defaults so."""
    return requests(load_benchmark({"benchmark": changes}), num_gpus=0)


def settings_file(folder, **benchmark):
    path = folder / "benchmark.yaml"
    path.write_text(yaml.safe_dump({"benchmark": benchmark}))
    return str(path)


def test_later_settings_file_overrides_an_earlier_one(tmp_path):
    (tmp_path / "later").mkdir()
    files = [
        settings_file(tmp_path, steps=7, rank=3),
        settings_file(tmp_path / "later", rank=5),
    ]
    args = benchmark_run.parser().parse_args(["--output", "-", "--configfile", *files])
    sizes = benchmark_run.wanted_requests(args, num_gpus=0)[0].sizes
    assert (sizes.steps, sizes.rank) == (7, 5)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The lines of two cases, one of which cannot run, by name."""
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = {
        "model": str(tiny_llama(folder / "model")), "seq_len": SEQ_LEN, "micro_batch_size": ROWS,
        "steps": STEPS, "rank": 3, "device": "cpu", "cases": ["flash", "ddp"],
    }  # fmt: skip
    command = [
        *(preloaded_python(), "-m", "workflow.scripts.benchmark_run"),
        *("--configfile", settings_file(folder, **sizes), "--together", "2"),
        *("--bases", str(folder / "bases"), "--output", str(folder / "lines.jsonl")),
    ]
    subprocess.run(command, check=True)
    return {row["case"]: row for row in read_lines(folder / "lines.jsonl")}


def test_measured_case_has_speed_losses_and_peaks(measured):
    found = measured["flash"]["measured"]
    assert measured["flash"]["status"] == "measured"
    assert len(found["losses"]) == len(found["grad_norms"]) == len(found["step_s"]) == STEPS
    assert all(norm > 0 for norm in found["grad_norms"])
    assert found["tokens_per_s_per_process"] == 2 * ROWS * SEQ_LEN / sum(found["step_s"][1:-1])
    assert found["host_bytes"] > 2**27
    assert found["bytes_read"] > 0
    assert found["checks"]
    assert all(check["passed"] for check in found["checks"])


def test_case_that_cannot_run_is_a_line_with_its_cause(measured):
    row = measured["ddp"]
    assert row["status"] == "failed"
    assert "shard_size = 1: must be at least 2" in row["cause"]


def test_line_has_shape_plan_and_prediction(measured):
    row = measured["flash"]
    assert shape_of_document(row["shape"]).num_layers > 0
    assert StepPlan.of(row["plan"]).seq_len == SEQ_LEN
    assert row["predicted"]["peak_bytes"] > 0


def test_unknown_shape_is_one_message_with_the_nearest_models():
    (request,) = wanted(cases=["flash"], model="meta-llama/Llama-2-70b-hg")
    with pytest.raises(UserError, match=r"benchmark.model = .*Did you mean .*Llama-2-70b-hf"):
        prepare(request, num_gpus=0, recordings=cast(Any, None))


def test_named_gpus_are_predicted_without_any(tmp_path):
    """Memory and speed of two GPUs that are not here; no base is written."""
    folder, output = str(tiny_llama(tmp_path / "model")), tmp_path / "lines.jsonl"
    sizes = {"model": folder, "seq_len": SEQ_LEN, "cases": ["flash", "trl_ddp"], "rank": 3}
    words = ["--configfile", settings_file(tmp_path, **sizes), "--predict", "2xH100"]
    words += ["--output", str(output), "--bases", str(tmp_path / "bases")]
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    row, peer = read_lines(output)
    assert (row["status"], peer["status"]) == ("predicted", "not_installed")
    assert row["gpu_names"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert "measured" not in row
    assert row["predicted"]["peak_bytes"] > 0
    assert row["predicted"]["time"]["tokens_per_s_per_process"] > 0
    assert not (tmp_path / "bases").exists()


@pytest.mark.parametrize(
    ("case", "packages"),
    [
        ("trl_fsdp2_liger", r"trl, .*liger_kernel \(envs/peers.txt\)"),
        ("unsloth", r"unsloth, unsloth_zoo, trl, .*datasets \(envs/unsloth.txt\)"),
    ],
)
def test_missing_packages_are_those_of_the_peer(monkeypatch, case, packages):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (request,) = wanted(cases=[case])
    assert re.search(packages, str(benchmark_run._missing_packages(request)))


def test_visible_gpus_are_not_replaced_by_others():
    with pytest.raises(UserError, match="--predict = 'H200': this machine shows NVIDIA L4"):
        benchmark_run.imagined_gpus("H200", visible=["NVIDIA L4"])


def test_finished_case_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_run, "launch", lambda args, ready: UserError(" ".join(ready)))
    output = tmp_path / "lines.jsonl"
    words = ["--configfile", settings_file(tmp_path, device="cpu"), "--output", str(output)]
    words += ["--cases", "flash", "sdpa"]
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    first, second = read_lines(output)
    write_lines(output, [first | {"status": "measured", "cause": None}, second])
    benchmark_run.main(benchmark_run.parser().parse_args(words))
    assert [row["status"] for row in read_lines(output)] == ["measured", "failed"]


def test_one_start_measures_neighbours_that_are_alike_and_peers_alone():
    found = wanted(
        cases=["flash", "sdpa", "hsdp", "batch_1", "trl_ddp", "trl_fsdp2"], processes=[2]
    )
    names = {str(number): request for number, request in enumerate(found)}
    assert list(benchmark_run.starts(names, together=2)) == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert len(list(benchmark_run.starts(names, together=1))) == 6


def job_of_tokens(tokens):
    plan = make_plan(seq_len=tokens)
    return cast(Job, SimpleNamespace(plan=plan, pairs=None, groups=None))


def measured_at(speed):
    """What workers write of a case of this speed."""
    return together([Observed(step_s=[1 / speed])], job_of_tokens(1)).as_json()


def several(args, asked):
    with recording_process() as recordings:
        prepared = partial(prepare, num_gpus=0, recordings=recordings)
        yield from benchmark_run.several(args, asked, prepared)


def speed_of(row):
    assert row.measured is not None
    return row.measured.tokens_per_s_per_process


def test_case_after_one_that_fails_is_measured_in_another_start(tmp_path, monkeypatch):
    """Workers that stop in the second of three cases have measured the first; the third gets a
    start of its own."""
    args = argparse.Namespace(output=tmp_path / "measurements.jsonl")
    failures = iter([UserError("out of GPU memory: x"), None])

    def launched(_, ready):
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
    tmp_path, monkeypatch
):
    monkeypatch.setattr(benchmark_run, "launch", lambda args, ready: UserError(" ".join(ready)))
    args = argparse.Namespace(output=tmp_path / "measurements.jsonl")
    benchmark_run.kept_folder(args).mkdir()
    write_checked_json(benchmark_run.kept_folder(args) / "flash.json", measured_at(7.0))
    asked = {found.name: found for found in wanted(cases=["flash", "sdpa"], device="cpu")}
    rows = {row.key: row for row in several(args, asked)}
    assert speed_of(rows["flash"]) == 7.0
    assert rows["sdpa"].cause == "sdpa", "it alone is started"


def test_first_step_begins_before_its_end_as_it_may_compile_for_longer_than_loading_may_take():
    begun = []

    def steps(*, first_step, num_steps):
        for step in range(first_step, num_steps):
            assert begun == list(range(step + 1))
            yield SimpleNamespace(step=step, elapsed_s=2.0 * step + 5.0, loss=1.0, grad_norm=0.5)

    observed = Observed()
    pulse = cast(Any, SimpleNamespace(step=begun.append))
    take_steps(cast(Any, SimpleNamespace(steps=steps)), 3, observed, pulse)
    assert observed.step_s == [5.0, 2.0, 2.0]


def test_measurement_takes_the_largest_peaks_and_the_speed_of_later_steps_but_the_last():
    one = Observed(step_s=[9.0, 5.0, 1.0, 0.5], reserved_bytes=5, host_bytes=1)
    other = Observed(step_s=[9.0, 2.0, 4.0, 0.5], reserved_bytes=3, host_bytes=8)
    found = together([one, other], job_of_tokens(30))
    assert found.tokens_per_s_per_process == 30 * 2 / 6.0
    assert (found.reserved_bytes, found.host_bytes) == (5, 8)
    assert found.reserved_bytes_by_process == [5, 3]

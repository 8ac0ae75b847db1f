"""What is predicted for a case on GPUs that are only imagined: what preflight's verdict says."""

from typing import Any, cast

import pytest

from tests.support.recordings import forked_recordings
from workflow.benchmark import prediction
from workflow.benchmark.cases import load_benchmark, requests
from workflow.benchmark.prediction import prepare
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.preflight.plan_search import NotRecordedError
from workflow.lib.recording.recording_process import PlanRecorder
from workflow.lib.settings.train import HardwareConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import parse_gpu
from workflow.lib.system.units import GIB

SIZES = {"seq_len": 1024, "micro_batch_size": 4, "check_bytes": False, "processes": [2]}


@pytest.fixture(scope="module")
def process():
    with forked_recordings() as started:
        yield started


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    machine = imagined_machine(2, parse_gpu("H200", setting="gpus"))
    monkeypatch.setattr(prediction, "read_machine", lambda _: machine)


def request_of(case, **sizes):
    (found,) = requests(
        load_benchmark({"benchmark": SIZES | {"cases": [case]} | sizes}), num_gpus=2
    )
    return found


def prepared(process, case, **sizes):
    return prepare(request_of(case, **sizes), num_gpus=2, recordings=process)


def test_predicted_memory_is_that_of_the_recording(process):
    found = prepared(process, "flash")
    assert found.predicted is not None
    record = PlanRecorder(process, found.config, found.shape, checked=False)
    peaks = replay(record.tape(found.plan))
    assert found.predicted["peak_bytes"] == peaks.peaks.allocated_bytes
    assert found.predicted["reserved_bytes"] == peaks.reserved_bytes
    assert found.predicted["phases"] == peaks.peaks.phase_bytes


@pytest.mark.parametrize("checked", [False, True])
def test_recording_is_made_after_the_checks_that_the_case_makes(checked):
    """What cannot be recorded runs without a prediction."""
    asked: list[bool] = []

    class Refusing:
        def peaks(self, config: dict[str, Any], plans: Any, *, checked: bool) -> Any:
            asked.append(checked)
            raise NotRecordedError("this model cannot be recorded")

    found = prepared(cast(Any, Refusing()), "flash", seq_len=992, check_bytes=checked)
    assert asked == [checked]
    assert found.predicted is not None
    assert found.predicted["peak_bytes"] == 0


def test_cap_bounds_what_is_predicted_to_be_reserved(process):
    """Without graphs, whose memory is not given back while they are there. A margin stays free."""
    sizes = {"model": "meta-llama/Llama-3.2-1B", "layers": 6, "micro_batch_size": 1}
    free = prepared(process, "python_launches", **sizes, check_bytes=True).predicted
    assert free is not None
    most = (free["peak_bytes"] + 2 * free["reserved_bytes"]) / 3  # with less it would not fit
    cap = most / GIB + HardwareConfig().memory_margin_gib
    capped = prepared(
        process, "python_launches", **sizes, check_bytes=True, memory_cap_gib=cap
    ).predicted
    assert capped is not None
    assert capped["peak_bytes"] == free["peak_bytes"]
    assert capped["reserved_bytes"] <= most < free["reserved_bytes"]


def test_layers_that_cannot_be_built_alone_are_the_benchmark_s_own_setting(process):
    """The first layers of Gemma 4 E4B share no keys, as its config.json says of the last ones."""
    model = {"model": "google/gemma-4-E4B", "layers": 8}
    with pytest.raises(UserError, match=r"^benchmark\.layers = 8: google/gemma-4-E4B with its"):
        prepared(process, "flash", **model)

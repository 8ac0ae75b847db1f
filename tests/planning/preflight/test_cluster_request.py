"""What a cluster is asked for: from the same prediction as preflight's verdict, with room."""

from contextlib import contextmanager

import pytest

from tests.support.made_up_memory import MadeUpMemory
from tests.support.mixtures import tiny_mixture
from tests.support.workflow_project import REPOSITORY
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.architecture.model_shape import described_config
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.planning import model_sizes
from workflow.lib.planning.preflight.cluster_request import (
    Allocation,
    quantizing,
    reading,
    training,
)
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json

BASE = REPOSITORY / "workflow" / "resources" / "base"
H100 = {"gpus": 2, "gpu_model": "H100", "nodes": 4}


def run_config(**sections):
    document = {"data": {"seq_len": 256}, "runs": {"demo": {}}}
    return load_config(document | sections)[1]["demo"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "description.json"
    config = {"config": described_config(BASE)}
    write_checked_json(path, describe_checkpoint(Checkpoint.open(BASE)).document() | config)
    return {"model": str(BASE), "description": str(path)}


@contextmanager
def made_up(_, shape):
    yield MadeUpMemory(shape)


@pytest.fixture
def manifest(tmp_path):
    """A million rows of 256 tokens, as long as the demo's."""
    train = {"packed_rows": 10**6, "tokens": 256 * 10**6, "trained_tokens": 128 * 10**6}
    path = tmp_path / "manifest.json"
    splits = {"train": train, "heldout": {"tokens": 10**5, "documents": 500}}
    write_checked_json(path, {"seq_len": 256, "vocab_size": 1024, "splits": splits})
    return str(path)


def hours(run, files, manifest):
    return training(run, **files, manifest=manifest, recorder=made_up).runtime / 60


@pytest.fixture(autouse=True)
def _login_node(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_twice_the_epochs_take_twice_the_time(files, manifest):
    one, two = (
        hours(run_config(hardware=H100, train={"epochs": n}), files, manifest) for n in (10.0, 20.0)
    )
    assert two - 1 / 3 == pytest.approx(2 * (one - 1 / 3), rel=0.01)  # 20 min to start and end


def test_gpus_ask_for_less_time_than_cpus(files, manifest):
    slow, fast = (hours(run_config(hardware=on), files, manifest) for on in ({"gpus": 0}, H100))
    assert fast < slow


def test_memory_is_of_one_node_whatever_their_number(files, manifest):
    few, many = (
        training(
            run_config(
                hardware=H100 | {"nodes": n}, train={"global_batch_size": 64, "micro_batch_size": 1}
            ),
            **files,
            manifest=manifest,
            recorder=made_up,
        )
        for n in (1, 8)
    )
    assert few.mem_mb == many.mem_mb
    assert 2 * 2.5 * 1024 < few.mem_mb < 10 * 1024  # two processes with CUDA


def test_merged_model_asks_for_more_memory(files, manifest):
    plain, merged = (
        reading(run_config(export={"merged": flag}), **files, manifest=manifest, recorder=made_up)
        for flag in (False, True)
    )
    assert merged.mem_mb - plain.mem_mb == pytest.approx(2 * 1024 * 1.25, abs=2)


def test_model_that_is_not_described_yet_is_named(files, manifest):
    with pytest.raises(UserError, match=r"description.json does not exist yet: describe_model"):
        reading(
            run_config(),
            model=files["model"],
            description="results/models/tiny/description.json",
            manifest=manifest,
            recorder=made_up,
        )


def test_quantization_needs_neither_tokens_nor_a_description(files):
    asked = quantizing(
        run_config(), model=files["model"], description="not there", manifest="not there"
    )
    assert asked == Allocation(mem_mb=asked.mem_mb, runtime=asked.runtime)
    assert 3 * 1024 < asked.mem_mb < 5 * 1024


def test_calibration_of_a_mixture_asks_for_its_experts(tmp_path, monkeypatch):
    """Of 11 experts a token goes to 2, and all 11 are rounded and lie on the host. A column takes a
    second here, so that nothing else counts."""
    monkeypatch.setattr(model_sizes, "COLUMN_S", 1.0)
    model, path = tiny_mixture("qwen3_moe", tmp_path / "model"), tmp_path / "description.json"
    write_checked_json(path, describe_checkpoint(Checkpoint.open(model)).document())
    ask = {"model": str(model), "description": str(path), "manifest": "not there"}
    hardware = {"gpus": 1, "gpu_model": "H100"}
    plain, calibrated = (
        quantizing(run_config(hardware=hardware, quantize={"method": method}), **ask)
        for method in ("absmax", "calibrated")
    )
    hidden = 3 * 4 * (24_576 + 3 * 32_768) * 64
    experts = 6 * 11 * (96 * 64 + 64 * 48)
    expected = (hidden + experts) * 1.25 / 2**20
    assert calibrated.mem_mb - plain.mem_mb == pytest.approx(expected, abs=1)
    columns = 2 * (4 * 64 + 11 * (64 + 48))
    rounding_min = columns / 60 * 1.5
    assert calibrated.runtime - plain.runtime == pytest.approx(rounding_min, abs=1)


def test_auto_asks_for_what_the_model_decides(files, monkeypatch):
    def ask(method):
        return quantizing(run_config(quantize={"method": method}), **files, manifest="not there")

    assert ask("auto") == ask("calibrated") != ask("absmax")
    monkeypatch.setattr(model_sizes, "AFFORDABLE_MIN", 0)
    assert ask("auto") == ask("absmax")


def test_calibration_asks_for_its_hidden_states_and_passes(files):
    plain, calibrated, longer = (
        quantizing(run_config(quantize=settings), **files, manifest="not there")
        for settings in (
            {},
            {"method": "calibrated"},
            {"method": "calibrated", "calibration_tokens": 2**22},
        )
    )
    assert plain.mem_mb < calibrated.mem_mb < longer.mem_mb
    assert plain.runtime <= calibrated.runtime < longer.runtime
    rows = 2**22 - 24_576  # more tokens, twice in fp32, 256 wide
    expected = rows * 2 * 4 * 256 * 1.25 / 2**20
    assert longer.mem_mb - calibrated.mem_mb == pytest.approx(expected, rel=0.01)

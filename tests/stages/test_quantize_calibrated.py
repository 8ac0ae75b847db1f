"""The stage with `quantize.method: calibrated`: what it measures, and how it goes on after a
kill."""

import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.forked_stage import command_line
from tests.support.tokenizing import tokenized_model
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.planning import model_sizes
from workflow.lib.quantization import calibrated_base
from workflow.lib.quantization.calibration import Calibration
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, read_checked_json, read_json
from workflow.scripts.quantize_base import main, parser

CPU = torch.device("cpu")
LAYERS = 3


def quantize(folder, output, *, model=None, **settings):
    config = {"quantize": {"method": "calibrated", "calibration_tokens": 1024} | settings}
    options = {"config": config, "model": model or folder / "model", "tokens": folder / "tokens"}
    options |= {"output": output, "log": output.with_suffix(".log")}
    main(parser().parse_args(command_line(options)))
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenized_model(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="module")
def base(folder):
    return quantize(folder, folder / "base")


@pytest.mark.parametrize(("minutes", "method"), [(60, "calibrated"), (0, "absmax")])
def test_auto_decides_by_the_model_and_says_why(
    folder, base, tmp_path, monkeypatch, caplog, *, minutes, method
):
    caplog.set_level("INFO", "workflow")
    monkeypatch.setattr(model_sizes, "AFFORDABLE_MIN", minutes)
    chosen = quantize(folder, tmp_path / "base", method="auto")
    record = read_checked_json(chosen / "quantization.json")
    assert record["method"] == method
    assert ("calibration" in record) == (method == "calibrated")
    assert f"{method}: {record['method_reason']}" in caplog.text
    same = base if method == "calibrated" else quantize(folder, tmp_path / "other", method=method)
    weights, expected = (stored_tensors(x) for x in (chosen, same))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def stored_tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def test_files_are_those_of_the_model_and_no_others(folder, base):
    names = {path.name for path in base.iterdir()}
    assert {name for name in names if name.endswith(".safetensors")} == {
        f"model-{number:05d}-of-00004.safetensors" for number in range(1, LAYERS + 2)
    }
    assert not list(folder.glob(".*partial"))
    index = read_json(base / "model.safetensors.index.json")["weight_map"]
    stored = {name for path in base.glob("*.safetensors") for name in load_file(path)}
    assert index.keys() == stored


class Killed(BaseException):
    """As a signal: nothing is tidied up."""


def test_stage_that_was_killed_goes_on_to_the_same_bytes(
    folder, base, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(calibrated_base, "STATE_S", -1.0)  # after every layer
    whole = Calibration.quantize

    def killed(self, number, hidden):
        if number == 2:
            raise Killed
        return whole(self, number, hidden)

    caplog.set_level("INFO", "workflow")
    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "quantize", killed)
        with pytest.raises(Killed):
            quantize(folder, tmp_path / "base")
    assert not (tmp_path / "base").exists()
    again = quantize(folder, tmp_path / "base")
    assert "2 of 3 layers are finished already" in caplog.text
    for path in base.glob("*.safetensors"):
        assert file_sha256(again / path.name) == file_sha256(path), path.name


def test_unfinished_work_for_other_settings_is_not_continued(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibrated_base, "STATE_S", -1.0)
    caplog.set_level("INFO", "workflow")
    with monkeypatch.context() as patch:
        patch.setattr("workflow.lib.quantization.calibration.document_losses", kill)
        with pytest.raises(Killed):
            quantize(folder, tmp_path / "base")
    quantize(folder, tmp_path / "base", block_size=128)
    assert "finished already" not in caplog.text
    assert (
        read_checked_json(tmp_path / "base" / "quantization.json")["settings"]["block_size"] == 128
    )


def kill(*_):
    raise Killed


def test_half_of_the_tokens_are_of_a_text_of_ones_own(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("One two three four, said the five of them. " * 400)
    base = quantize(folder, tmp_path / "base", calibration_text=str(text))
    tokens = read_checked_json(base / "quantization.json")["calibration"]["tokens"]
    assert math.isclose(tokens, 1024, rel_tol=0.2)


def test_more_tokens_than_there_are_are_told(folder, tmp_path, caplog):
    rows = TokenStore.open(folder / "tokens").num_rows
    base = quantize(folder, tmp_path / "base", calibration_tokens=100_000)
    assert f"and there are {rows}: all calibrate" in caplog.text
    assert read_checked_json(base / "quantization.json")["calibration"]["tokens"] < 100_000


def bad_text(folder, content):
    (folder / "text.txt").write_bytes(content)
    return {"calibration_text": str(folder / "text.txt")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "it cannot be read as UTF-8 text"),
        (b"short", "it has .* tokens, and a row"),
    ],
    ids=["binary", "short"],
)
def test_text_that_cannot_calibrate_is_refused(folder, tmp_path, content, message):
    with pytest.raises(UserError, match=f"quantize.calibration_text = .*{message}"):
        quantize(folder, tmp_path / "base", **bad_text(tmp_path, content))
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("name", "place"), [("mlp.gate_proj", "[0, 5]"), ("input_layernorm", "[5]")]
)
def test_value_that_is_no_finite_number_is_named(folder, tmp_path, name, place):
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors[f"model.layers.1.{name}.weight"].view(-1)[5] = torch.nan
    model = shutil.copytree(folder / "model", tmp_path / "model")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    expected = f"model.safetensors: model.layers.1.{name}.weight{place} is nan (1 of "
    with pytest.raises(UserError, match=re.escape(expected)):
        quantize(folder, tmp_path / "base", model=model)


def test_damaged_tokens_are_refused(folder, tmp_path):
    tokens = shutil.copytree(folder / "tokens", tmp_path / "tokens")
    data = bytearray((tokens / "train.input_ids.npy").read_bytes())
    data[-4] ^= 1
    (tokens / "train.input_ids.npy").write_bytes(data)
    (tmp_path / "model").symlink_to(folder / "model")
    with pytest.raises(UserError, match=r"train\.input_ids\.npy is damaged"):
        quantize(tmp_path, tmp_path / "base")

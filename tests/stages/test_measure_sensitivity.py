"""The stage as a program: costs of 4 bits by weight and kind of text."""

import pytest

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.models import quantized
from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import tokenized_model
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Sensitivities


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tokenized_model(tmp_path_factory.mktemp("sensitivity"))
    (folder / "text.txt").write_text("tell me about paris and rome " * 40)
    return folder


def measure(folder, output, *, model="model", **settings):
    return forked_stage(
        "measure_sensitivity",
        config={"quantize": settings},
        model=folder / model,
        tokens=folder / "tokens",
        output=output,
        log=output.with_suffix(".log"),
    )


def test_every_linear_has_its_cost_on_every_kind_of_text(folder, tmp_path):
    done = measure(folder, tmp_path / "costs.json", calibration_text=str(folder / "text.txt"))
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "costs.json", Sensitivities)
    assert record.nats.keys() == record.tokens.keys() >= {"training", "text", "prose", "code"}
    for costs in record.nats.values():
        assert len(costs) == 21
        assert all(cost > 0 for cost in costs.values())
    assert record.model_files.keys() == {"model.safetensors"}


def test_checkpoint_in_4_bits_is_told_to_have_no_others(folder, tmp_path):
    quantized(folder / "model", folder / "nf4")
    tiny_tokenizer(folder / "nf4")
    output = tmp_path / "costs.json"
    message = refusal_of(measure(folder, output, model="nf4"), output=output)
    assert "quantize.keep = 'auto'" in message
    assert "no 16 bits to keep. Set keep to []. Or: Set model.source to the original" in message

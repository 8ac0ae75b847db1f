"""A base that stock Transformers has saved in NF4 is taken byte by byte, or refused by name."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.mixtures import tiny_mixture
from tests.support.models import tiny_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.describe_model import describe_folder
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.model.published.converted_reader import ConvertedReader
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json
from workflow.scripts.command import stage_parser
from workflow.scripts.quantize_base import add_arguments, main


def in_nf4(source, folder, *, dtype, **settings):
    """Quantize a model by stock Transformers, and save it."""
    quantization = BitsAndBytesConfig(
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        | settings
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=quantization, dtype=dtype, device_map="cpu"
    )
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def quantize(model, output, **settings):
    words = ["--config", json.dumps({"quantize": settings}), "--model", str(model)]
    words += ["--output", str(output), "--log", str(output.with_suffix(".log"))]
    main(add_arguments(stage_parser("")).parse_args(words))
    return output


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("source"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(source, tmp_path_factory):
    return in_nf4(source, tmp_path_factory.mktemp("published"), dtype=torch.bfloat16)


def stored(folder):
    with CheckpointReader(folder) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def test_bytes_of_a_published_base_are_those_of_the_run(published, tmp_path):
    base = quantize(published, tmp_path / "base")
    found, expected = stored(base), stored(published)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    record = read_checked_json(base / "quantization.json")
    assert record["method_reason"] == "model.source is in NF4 already: its bytes are taken"
    options: Any = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    ours, theirs = (load_base(x, attention="sdpa", **options) for x in (base, published))
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_published_base_is_read_as_the_weights_that_it_decodes_to(published):
    shape = describe_folder(published)
    assert (shape.source_dtype, shape.left_tensors) == ("BF16", 0)
    stock = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj"
    expected = stock.dequantize().get_submodule(name).weight.to(torch.bfloat16)
    with ConvertedReader(published, build_on_meta(published, dtype=torch.bfloat16)) as reader:
        assert reader.dtype(f"{name}.weight") == "BF16"
        assert torch.equal(reader.tensor(f"{name}.weight"), expected)
        assert torch.equal(reader.rows(f"{name}.weight", 7, 11), expected[7:11])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 128}, r"quantize\.block_size = 128: .*NF4 already, with 64"),
        ({"double_quant": False}, r"quantize\.double_quant = False: .*with True.*to true"),
        ({"method": "calibrated"}, r"quantize\.method = 'calibrated': .*taken as they are"),
    ],
)
def test_settings_that_the_published_base_has_not_are_refused(
    published, tmp_path, settings, message
):
    with pytest.raises(UserError, match=message):
        quantize(published, tmp_path / "base", **settings)


def test_base_of_which_some_linears_are_in_16_bits_is_refused(source, tmp_path):
    skipped = ["lm_head", "model.layers.1.mlp.down_proj"]
    model = in_nf4(source, tmp_path / "model", dtype=torch.bfloat16, llm_int8_skip_modules=skipped)
    with pytest.raises(UserError, match=r"1 of 21 linears are not \(model\.layers\.1\.mlp\.down_p"):
        quantize(model, tmp_path / "base")


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_other_types_of_bitsandbytes_are_refused(source, tmp_path, kind):
    settings = {"load_in_4bit": False, "load_in_8bit": True}
    if kind == "fp4":
        settings = {"bnb_4bit_quant_type": "fp4"}  # type: ignore[dict-item]
    model = in_nf4(source, tmp_path / "model", dtype=torch.bfloat16, **settings)
    with pytest.raises(UserError, match=f"bitsandbytes has quantized to {kind}, and only nf4"):
        describe_folder(model)


def test_mixture_in_nf4_is_refused(tmp_path):
    source = tiny_mixture("mixtral", tmp_path / "source", dtype=torch.bfloat16)
    model = in_nf4(source, tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"in NF4 already, and has experts \(model\.layers\.0"):
        quantize(model, tmp_path / "base")

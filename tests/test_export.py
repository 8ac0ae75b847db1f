"""From the sharded adapter to files: PEFT reads them, and the merged model is the sum computed by hand."""

import math
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.finished import finished
from tests.models import VOCAB, quantized, tiny_llama, write_shards
from workflow.lib.artifacts import read_json
from workflow.lib.config import ExportConfig
from workflow.lib.errors import UserError
from workflow.lib.export import (
    check_adapter,
    dequantized_weight,
    merged_tensors,
    read_sharded_adapter,
    save_adapter,
    write_merged,
)
from workflow.lib.targets import adapter_scale
from workflow.lib.weights import CheckpointReader

NAME = "base_model.model.model.layers.1.mlp.down_proj"
A, B = f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def adapter(run: Path) -> dict[str, torch.Tensor]:
    return read_sharded_adapter(run / "finetune" / "adapter")


@pytest.fixture(scope="module")
def config(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = read_json(run / "finetune" / "adapter_config.json")
    return loaded


def test_sharded_adapter_has_every_tensor_in_fp32(adapter: dict[str, torch.Tensor]) -> None:
    assert len(adapter) == 2 * 3 * 7
    assert {t.dtype for t in adapter.values()} == {torch.float32}
    assert adapter[A].shape == (3, 176)
    assert adapter[B].shape == (80, 3)


def test_exported_files_load_in_stock_peft_value_by_value(
    run: Path, adapter: dict[str, torch.Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    save_adapter(adapter, config, tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == adapter.keys()
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(tmp_path))
    loaded = {n.replace(".default.", "."): p for n, p in tuned.named_parameters() if "lora_" in n}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in adapter.items())
    layers = [m for m in tuned.modules() if isinstance(m, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {adapter_scale(config, "any")}


def damaged(adapter: dict[str, torch.Tensor], **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return adapter | {{"a": A, "b": B}[key]: tensor for key, tensor in changes.items()}


def test_adapter_that_is_not_finite_is_refused(adapter: dict[str, torch.Tensor]) -> None:
    for value in (math.nan, math.inf):
        broken = adapter[A].clone()
        broken[2, 7] = value
        with pytest.raises(UserError) as caught:
            check_adapter(damaged(adapter, a=broken))
        assert (
            str(caught.value)
            == f"adapter tensor {A} is not finite. Lower train.learning_rate and train again."
        )


def test_adapter_without_effect_is_refused(adapter: dict[str, torch.Tensor]) -> None:
    zeroed = {n: t * 0 if ".lora_B." in n else t for n, t in adapter.items()}
    with pytest.raises(UserError) as caught:
        check_adapter(zeroed)
    assert str(caught.value) == (
        "every B of the adapter is zero: it changes nothing. Train longer (train.max_steps)."
    )
    check_adapter(damaged(zeroed, b=adapter[B]))  # one that is not zero will do


def test_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {})
    with pytest.raises(UserError, match=r"the sharded adapter has no tensors\. Train again\."):
        read_sharded_adapter(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "a part missing", "no index", "nothing there"])
def test_damaged_folder_is_refused(run: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "adapter"
    if damage != "nothing there":
        folder.mkdir()
        for path in (run / "finetune" / "adapter").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    part = folder / "shard-00001-of-00002.safetensors"
    if damage == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "a part missing":
        part.unlink()
    elif damage == "no index":
        (folder / "index.json").unlink()
    with pytest.raises(UserError) as caught:
        read_sharded_adapter(folder)
    message = str(caught.value)
    assert message.startswith(f"the sharded adapter in {folder} cannot be read (")
    assert "Train again: delete that folder" in message
    assert "Traceback" not in message


def merge(run: Path, adapter: Any, config: Any, *, onto: str) -> dict[str, torch.Tensor]:
    with CheckpointReader(run / "model") as original, CheckpointReader(run / "base") as nf4:
        return dict(merged_tensors(adapter, config, original=original, nf4=nf4, onto=onto))


@pytest.mark.parametrize("onto", ["dequantized", "original"])
def test_merged_weights_are_the_sum_by_hand(
    run: Path, adapter: dict[str, torch.Tensor], config: dict[str, Any], onto: str
) -> None:
    """W + s B A in fp32, rounded once; W as bitsandbytes itself quantizes and dequantizes it."""
    original = load_file(run / "model" / "model.safetensors")
    merged = merge(run, adapter, config, onto=onto)
    assert merged.keys() == original.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16, name
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in adapter:
            assert torch.equal(tensor, original[name]), name
            continue
        weight = original[name].float()
        if onto == "dequantized":
            packed, state = bnb.quantize_4bit(
                original[name], blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            state.dtype = torch.float32
            weight = bnb.dequantize_4bit(packed, state)
        update = (
            7.5 / math.sqrt(3) * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        )
        torch.testing.assert_close(tensor.float(), weight + update, rtol=2**-8, atol=1e-6)  # bf16
        assert float(update.abs().max()) > 0.01 * float(weight.abs().max())


def test_the_two_merged_models_differ(run: Path, adapter: Any, config: Any) -> None:
    one, other = (merge(run, adapter, config, onto=onto) for onto in ("dequantized", "original"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(one[name], other[name])


@torch.no_grad()
def test_merged_model_in_stock_transformers_has_the_tuned_models_logits(
    run: Path, adapter: dict[str, torch.Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    with CheckpointReader(run / "model") as original, CheckpointReader(run / "base") as nf4:
        tensors = merged_tensors(adapter, config, original=original, nf4=nf4, onto="original")
        size = write_merged(
            tensors, run / "model", tmp_path / "merged", settings=ExportConfig(shard_gib=1e-4)
        )
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    shapes = load_file(run / "model" / "model.safetensors").values()
    assert size == sum(2 * tensor.numel() for tensor in shapes)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    save_adapter(adapter, config, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    ours, theirs = merged.float()(ids).logits, tuned(ids).logits
    # merged weights are rounded to bf16, 8 bits, in three layers
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))


def test_merged_config_is_the_originals_in_bf16(run: Path, tmp_path: Path) -> None:
    write_merged(
        iter({"a": torch.zeros(2)}.items()), run / "model", tmp_path / "m", settings=ExportConfig()
    )
    written, original = (
        read_json(tmp_path / "m" / "config.json"),
        read_json(run / "model" / "config.json"),
    )
    assert written == original | {"dtype": "bfloat16"}
    assert "quantization_config" not in written


def test_adapter_of_another_model_is_not_merged(run: Path, adapter: Any, config: Any) -> None:
    foreign = adapter | {
        A.replace("layers.1", "layers.9"): adapter[A],
        B.replace("layers.1", "layers.9"): adapter[B],
    }
    with pytest.raises(
        UserError,
        match=r"tensors for base_model\.model\.model\.layers\.9\.mlp\.down_proj, which the model has not",
    ):
        merge(run, foreign, config, onto="original")


@pytest.mark.parametrize("double_quant", [True, False])
def test_dequantized_weight_of_a_checkpoint_is_what_training_multiplies_with(
    tmp_path: Path, double_quant: bool
) -> None:
    from tests.models import adapted
    from workflow.lib.nf4 import nf4_linears

    base = quantized(tiny_llama(tmp_path / "model"), tmp_path / "nf4", double_quant=double_quant)
    linears = dict(nf4_linears(adapted(base).peft_model.get_base_model()))
    with CheckpointReader(base) as reader:
        for path, linear in linears.items():
            stored = dequantized_weight(reader, path.removesuffix(".base_layer"))
            assert torch.equal(stored, linear.dequantize(torch.float32)), path

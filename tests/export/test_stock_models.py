import re
import shutil

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models import VOCAB, decoded_by_hand, quantized, stock_base, tiny_llama
from tests.support.tiny_export import tiny_adapter, tiny_base
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.sharded_models import load_sharded_adapter
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.backends import resolve_attention, resolve_dtype
from workflow.lib.system.errors import UserError

CPU = torch.device("cpu")
IDS = torch.randint(6, VOCAB, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    tiny_base(folder / "base16", dtype=torch.bfloat16)
    tiny_adapter(tiny_base(folder / "base"), folder / "adapter")
    return folder


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def copy_with(folder, target, change):
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def test_base_has_the_logits_of_the_model_that_was_quantized(folder):
    stock = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, device_map="cpu"
    )
    for module in stock.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    assert torch.equal(logits(stock_base(folder / "base")), logits(stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_whose_rows_are_not_whole_blocks_has_the_weights_that_were_quantized(tmp_path, dtype):
    """80 and 176 weights a row in blocks of 64: bitsandbytes would decode them with the scales of
    other blocks."""
    base = quantized(tiny_llama(tmp_path / "original"), tmp_path / "nf4")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=dtype)
    for path, linear in expected.named_modules():
        if isinstance(linear, torch.nn.Linear) and path != "lm_head":
            packed, state = quantize_4bit(
                load_file(tmp_path / "original" / "model.safetensors")[f"{path}.weight"],
                blocksize=64, compress_statistics=True, quant_type="nf4",
            )  # fmt: skip
            linear.weight.data = decoded_by_hand(packed, state).to(dtype)
    assert torch.equal(logits(stock_base(base, dtype=dtype)), logits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["base", "base16"])
def test_everything_not_quantized_is_in_the_compute_dtype(folder, stored, dtype):
    model = stock_base(folder / stored, dtype=dtype)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    assert len(floating) == 2 + 2 * 2 + 1  # embedding, head, two norms a layer, the last norm
    assert {p.dtype for p in floating} == {dtype}
    assert logits(model).dtype == dtype


def test_4_bit_linears_compute_in_the_compute_dtype(folder):
    linears = [
        m for m in stock_base(folder / "base16", dtype=torch.float32).modules()
        if isinstance(m, Linear4bit)
    ]  # fmt: skip
    assert len(linears) == 2 * 7
    assert {m.compute_dtype for m in linears} == {torch.float32}
    assert {m.weight.quant_state.dtype for m in linears} == {torch.float32}


def test_rotary_frequencies_stay_in_float32(folder):
    model = stock_base(folder / "base", dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_evaluation_forward_leaves_packed_weights_as_they_are(folder):
    """On CPUs with AVX512-BF16 bitsandbytes would repack them; on others nothing happens anyway."""
    model = stock_base(folder / "base", dtype=torch.bfloat16)
    linear = model.model.layers[0].mlp.down_proj
    before = linear.weight.data.clone()
    logits(model)
    assert torch.equal(linear.weight.data, before)
    assert linear.support_avx512bf16_for_cpu is False


def test_base_without_a_tensor_is_refused(folder, tmp_path):
    broken = copy_with(folder / "base", tmp_path / "b", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(
        UserError, match=r"does not fit the model.*1 missing \(model\.norm\.weight\).*make it again"
    ):
        stock_base(broken)


def test_base_with_a_tensor_too_many_is_refused(folder, tmp_path):
    broken = copy_with(folder / "base", tmp_path / "b", lambda t: t.update(extra=torch.ones(3)))
    with pytest.raises(UserError, match=r"1 left over \(extra\)"):
        stock_base(broken)


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no model \(config\.json is not there\)"):
        stock_base(tmp_path)


def test_adapter_adds_b_a_x_times_alpha_over_r(folder):
    plain = stock_base(folder / "base").model.layers[1].mlp.up_proj
    tuned = load_adapter(stock_base(folder / "base"), Adapter(folder / "adapter"))
    adapted = tuned.base_model.model.model.layers[1].mlp.up_proj
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(x) + x @ weights[prefix + "A.weight"].T @ weights[
            prefix + "B.weight"
        ].T * (7 / 3)
        # fp32 sums of 64 terms in another order
        torch.testing.assert_close(adapted(x), expected, rtol=1e-5, atol=1e-5)


A_TENSOR = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"


def test_adapter_without_a_tensor_is_refused(folder, tmp_path):
    broken = copy_with(folder / "adapter", tmp_path / "a", lambda t: t.pop(A_TENSOR))
    with pytest.raises(UserError, match=rf"1 missing \({re.escape(A_TENSOR)}\)"):
        load_adapter(stock_base(folder / "base"), Adapter(broken))


def test_adapter_with_a_tensor_that_has_no_place_is_refused(folder, tmp_path):
    other = A_TENSOR.replace("layers.0", "layers.2")
    broken = copy_with(
        folder / "adapter", tmp_path / "a", lambda t: t.update({other: torch.ones(96, 3)})
    )
    with pytest.raises(UserError, match=rf"1 left over \({re.escape(other)}\)"):
        load_adapter(stock_base(folder / "base"), Adapter(broken))


def test_adapter_of_another_shape_is_refused(folder, tmp_path):
    broken = copy_with(
        folder / "adapter", tmp_path / "a", lambda t: t.update({A_TENSOR: torch.ones(96, 5)})
    )
    with pytest.raises(UserError, match=r"does not fit the base model.*size mismatch"):
        load_adapter(stock_base(folder / "base"), Adapter(broken))


def test_folder_without_an_adapter_is_refused(folder, tmp_path):
    with pytest.raises(
        UserError, match=r"holds no exported adapter \(adapter_config\.json is not there\)"
    ):
        load_adapter(stock_base(folder / "base"), Adapter(tmp_path))


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_compute_dtype_by_name_and_device(name, device, dtype):
    assert resolve_dtype(name, torch.device(device)) == dtype


def test_flash_attention_on_a_cpu_is_refused():
    with pytest.raises(
        UserError,
        match=r"model\.attention = 'flash_attention_2': it needs a GPU.*Set it to auto or eager",
    ):
        resolve_attention("flash_attention_2", CPU)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def load_on(device, folder):
    return load_base(
        Checkpoint(folder / "base"),
        device=torch.device(device),
        compute_dtype=torch.float32,
        attention="sdpa",
    )


@pytest.mark.gpu
@needs_gpu
def test_tuned_logits_on_a_gpu_are_those_on_a_cpu(folder):
    on_cpu = logits(load_adapter(stock_base(folder / "base"), Adapter(folder / "adapter")))
    tuned = load_adapter(load_on("cuda", folder), Adapter(folder / "adapter"))
    assert {p.device.type for p in tuned.parameters()} == {"cuda"}
    with torch.no_grad():
        on_gpu = tuned(IDS.cuda()).logits.cpu()
    # fp32, but TF32 may be on and the 4-bit kernels differ: 10 bits of mantissa through two layers.
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
@needs_two
def test_model_larger_than_the_first_gpu_goes_on_to_the_second(folder, monkeypatch):
    one = load_adapter(load_on("cuda:0", folder), Adapter(folder / "adapter"))
    free = torch.cuda.mem_get_info
    room = 180_000  # bytes: the embedding, a layer, and the reserve for the largest module
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda d: (room if d == 0 else free(d)[0], free(d)[1])
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)  # no cache
    both = load_adapter(load_on("cuda", folder), Adapter(folder / "adapter"))
    assert {p.device.index for p in both.parameters()} == {0, 1}
    with torch.no_grad():
        # the same kernels on two equal GPUs, but PEFT may move the adapter's sums to another stream
        torch.testing.assert_close(both(IDS.cuda()).logits, one(IDS.cuda()).logits)


def load_whole(base, adapter):
    return load_adapter(stock_base(base), Adapter(adapter))


def load_slices(base, adapter):
    """Ask for them; files are looked at before any process is."""
    build = {"compute_dtype": torch.float32, "attention": "sdpa"}
    return load_sharded_adapter(Checkpoint(base), Adapter(adapter), world=None, **build)


@pytest.mark.parametrize("load_tuned", [load_whole, load_slices])
@pytest.mark.parametrize("part", ["base", "adapter"])
def test_file_that_was_cut_is_named_with_what_mends_it(folder, tmp_path, part, load_tuned):
    cut = tmp_path / part
    shutil.copytree(folder / part, cut)
    (file,) = cut.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    base, adapter = (cut if part == name else folder / name for name in ("base", "adapter"))
    with pytest.raises(UserError) as caught:
        load_tuned(base, adapter)
    assert str(caught.value).startswith(f"{file} is not a whole safetensors file (")
    assert str(caught.value).endswith(f"Delete the folder {cut}; it is made again.")

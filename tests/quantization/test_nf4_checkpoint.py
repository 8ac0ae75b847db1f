"""Our NF4 checkpoint against the one that Transformers makes itself, its files, and what is
refused."""

import json

import pytest
import torch
from bitsandbytes.nn import Params4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.forked_stage import command_line
from tests.support.mixtures import tiny_mixture
from tests.support.models import VOCAB, quantized, stored_tensors, tiny_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.checkpoints.checkpoint import Checkpoint, check_loading
from workflow.lib.checkpoints.safetensors_reader import INDEX
from workflow.lib.export.stock_models import load_base
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.model.adaptable_linears import adaptable_linears
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.quantization.nf4_checkpoint import ShardWriter, check_model
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json, read_json
from workflow.scripts.quantize_base import main, parser

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("original"), dtype=torch.bfloat16)


@pytest.mark.parametrize("settings", [{}, {"double_quant": False}], ids=str)
def test_checkpoint_is_the_one_that_transformers_makes(original, tmp_path, settings):
    """Same tensors, byte for byte: packed weights, scales, code tables, packed state, and what is
    copied. Block size 64 is all it knows."""
    ours = stored_tensors(quantized(original, tmp_path / "ours", **settings))
    double = QuantizeConfig(**settings).double_quant
    model = AutoModelForCausalLM.from_pretrained(
        original,
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
        ),
    )
    model.save_pretrained(tmp_path / "theirs")
    theirs = stored_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].reshape(tensor.shape), tensor), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stock_transformers_loads_the_checkpoint_whole_and_packed(tmp_path, tied):
    source = tiny_llama(tmp_path / "original", tied=tied)
    base = quantized(source, tmp_path / "nf4")
    model, report = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    packed = [name for name, p in model.named_parameters() if isinstance(p, Params4bit)]
    assert len(packed) == 3 * len(LINEARS)
    assert {name.split(".")[-2] for name in packed} == set(LINEARS)
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert ("lm_head.weight" in stored_tensors(base)) is not tied


class TestShards:
    def write(self, folder, sizes, *, shard_bytes):
        folder.mkdir(exist_ok=True)
        writer = ShardWriter(folder, shard_bytes=shard_bytes)
        for number, size in enumerate(sizes):
            writer.add({f"t{number}": torch.full((size,), number, dtype=torch.uint8)})
        writer.close()
        return writer

    def test_files_are_cut_before_they_exceed_the_size(self, tmp_path):
        writer = self.write(tmp_path, [60, 40, 1, 250, 99], shard_bytes=100)
        assert writer.total_bytes == 450
        files = sorted(tmp_path.glob("*.safetensors"))
        assert [f.name for f in files] == [
            f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)
        ]
        assert [sorted(load_file(f)) for f in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]

    def test_index_names_the_file_of_every_tensor_and_the_total(self, tmp_path):
        self.write(tmp_path, [60, 41, 7], shard_bytes=100)
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_size": 108}
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / file)
        assert sorted(index["weight_map"]) == ["t0", "t1", "t2"]

    def test_no_temporary_name_stays(self, tmp_path):
        self.write(tmp_path, [60, 60], shard_bytes=100)
        assert len(list(tmp_path.iterdir())) == 3

    def test_what_waits_never_exceeds_a_shard_or_one_tensor(self, tmp_path):
        """The memory of quantization and merging: a shard, or a tensor larger than it, and the next
        tensor."""
        writer = ShardWriter(tmp_path, shard_bytes=100)
        draw = torch.Generator().manual_seed(0)
        for number in range(50):
            size = int(torch.randint(1, 180, (), generator=draw))
            writer.add({f"t{number}": torch.zeros(size, dtype=torch.uint8)})
            waiting = sum(t.nbytes for t in writer._pending.values())
            assert waiting <= max(100, size)
        writer.close()

    def test_checkpoint_of_many_shards_is_whole(self, original, tmp_path):
        base = quantized(original, tmp_path / "nf4")
        assert len(list(base.glob("*.safetensors"))) > 2


def refusal(folder):
    with pytest.raises(UserError) as caught, Checkpoint(folder).weights() as reader:
        check_loading(reader)
    return str(caught.value)


def rewritten(folder, change):
    """Save a tiny Llama with some tensors replaced, or left out (None)."""
    tiny_llama(folder)
    unquantized = {
        n: t for n, t in (load_file(folder / "model.safetensors") | change).items() if t is not None
    }
    save_file(unquantized, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_checkpoint_without_a_tensor_of_the_model_is_refused(tmp_path):
    message = refusal(rewritten(tmp_path / "model", {Q_PROJ: None, "model.norm.weight": None}))
    assert f"model: the checkpoint has no tensor {Q_PROJ}, nor 1 more that" in message
    assert message.endswith("check model.source.")


def test_tensors_under_names_of_a_wrapper_are_told(tmp_path):
    folder = tiny_llama(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, folder / "model.safetensors", metadata={"format": "pt"})
    assert f", but {len(tensors)} others (_orig_mod.lm_head.weight first)" in refusal(folder)


@pytest.mark.parametrize("name", [Q_PROJ, "model.embed_tokens.weight"])
def test_tensor_of_another_shape_is_refused(tmp_path, name):
    expected = (VOCAB, 80) if "embed" in name else (80, 80)
    message = refusal(rewritten(tmp_path / "model", {name: torch.zeros(VOCAB + 6, 80)}))
    assert message.endswith(
        f"{name} has shape {[VOCAB + 6, 80]}, but config.json says {[*expected]}. "
        "The files do not belong together: check model.source."
    )


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")],
)
def test_weight_of_another_type_is_refused(tmp_path, dtype, shown):
    message = refusal(rewritten(tmp_path / "model", {Q_PROJ: torch.zeros(80, 80).to(dtype)}))
    assert message.endswith(
        f"{Q_PROJ} is stored as {shown}, which is neither bf16, fp16 nor fp32, nor a format that "
        "is decoded. Set model.source to the original bf16, fp16 or fp32 checkpoint."
    )


def test_model_without_a_linear_layer_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    model = Checkpoint(tmp_path).build(torch.bfloat16)
    with pytest.raises(UserError, match="GPT2LMHeadModel has no linear layer besides its head"):
        check_model(model, adaptable_linears(model))


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
    options = {"config": {"quantize": settings}, "model": model, "output": output}
    main(parser().parse_args(command_line(options | {"log": output.with_suffix(".log")})))
    return output


@pytest.fixture(scope="module")
def published(original, tmp_path_factory):
    return in_nf4(original, tmp_path_factory.mktemp("published"), dtype=torch.bfloat16)


def test_bytes_of_a_published_base_are_those_of_the_run(published, tmp_path):
    base = quantize(published, tmp_path / "base")
    found, expected = stored_tensors(base), stored_tensors(published)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    record = read_checked_json(base / "quantization.json")
    assert record["method_reason"] == "model.source is in NF4 already: its bytes are taken"
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    ours, theirs = (
        load_base(Checkpoint(x), attention="sdpa", **options) for x in (base, published)
    )
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_published_base_is_read_as_the_weights_that_it_decodes_to(published):
    shape = describe_checkpoint(Checkpoint.open(published))
    assert (shape.source_dtype, shape.left_tensors) == ("BF16", 0)
    stock = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj"
    weight = stock.get_submodule(name).weight
    weight.quant_state.dtype = torch.float32  # early versions round to the stored dtype on the way
    expected = decoded(weight.data, weight.quant_state).to(torch.bfloat16)
    with Checkpoint(published).weights() as reader:
        assert reader.dtype(f"{name}.weight") == "BF16"
        assert torch.equal(reader.tensor(f"{name}.weight"), expected)
        assert torch.equal(reader.rows(f"{name}.weight", 7, 11), expected[7:11])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 128}, r"quantize\.block_size = 128: .*NF4 already, with 64"),
        ({"double_quant": False}, r"quantize\.double_quant = false: .*with True.*to true"),
        ({"method": "calibrated"}, r"quantize\.method = 'calibrated': .*taken as they are"),
        ({"method": "none"}, r"quantize\.method = 'none': .*no 16 bits to keep.*Set absmax"),
        (
            {"keep": ["q_proj"]},
            r"quantize\.keep = \['q_proj'\]: .*no 16 bits.*out of keep",
        ),
    ],
)
def test_settings_that_the_published_base_has_not_are_refused(
    published, tmp_path, settings, message
):
    with pytest.raises(UserError, match=message):
        quantize(published, tmp_path / "base", **settings)


def test_base_of_which_some_linears_are_in_16_bits_is_refused(original, tmp_path):
    skipped = ["lm_head", "model.layers.1.mlp.down_proj"]
    model = in_nf4(
        original, tmp_path / "model", dtype=torch.bfloat16, llm_int8_skip_modules=skipped
    )
    with pytest.raises(UserError, match=r"1 of 21 linears are not \(model\.layers\.1\.mlp\.down_p"):
        quantize(model, tmp_path / "base")
    base = quantize(model, tmp_path / "base", keep=[r"layers\.1\.mlp\.down_proj"])
    assert stored_tensors(base).keys() == stored_tensors(model).keys()


@pytest.mark.parametrize("settings", [{"method": "none"}, {"keep": ["down_proj", "layers.1"]}])
def test_kept_weights_are_the_bytes_of_the_checkpoint(original, tmp_path, settings):
    """And with all of them the base is a plain copy."""
    base = quantize(original, tmp_path / "base", **settings)
    found, expected = stored_tensors(base), stored_tensors(original)
    kept = {name for name in expected if name in found and found[name].dtype != torch.uint8}
    linears = {name.split(".")[-2] for name in kept if ".layers.0." in name}
    assert linears >= ({"down_proj"} if "keep" in settings else {*LINEARS})
    assert ("q_proj" in linears) is ("keep" not in settings)
    for name in kept:
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name
    record = read_checked_json(base / "quantization.json")
    if "keep" in settings:
        assert record["kept"] == 9
    else:
        assert found.keys() == expected.keys()
        assert record["method"] == "none"
        assert "quantization_config" not in read_json(base / "config.json")


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_other_types_of_bitsandbytes_are_refused(original, tmp_path, kind):
    settings = {"load_in_4bit": False, "load_in_8bit": True}
    if kind == "fp4":
        settings = {"bnb_4bit_quant_type": "fp4"}
    model = in_nf4(original, tmp_path / "model", dtype=torch.bfloat16, **settings)
    with pytest.raises(UserError, match=f"bitsandbytes has quantized to {kind}, and only nf4"):
        describe_checkpoint(Checkpoint.open(model))


def test_mixture_in_nf4_is_refused(tmp_path):
    source = tiny_mixture("mixtral", tmp_path / "source", dtype=torch.bfloat16)
    model = in_nf4(source, tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"in NF4 already, and has experts \(model\.layers\.0"):
        quantize(model, tmp_path / "base")

"""A model's folder as one object."""

import json
import re
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.families import FAMILIES, MOE, SIZES, tiny_family, tiny_model
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized, tiny_llama
from tests.support.packed_checkpoints import fp8_checkpoint, integer_checkpoint
from tests.system.test_checksums import recorded_as_download
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import is_tied
from workflow.lib.export.adapter_files import merged_tensors
from workflow.lib.export.stock_models import load_base
from workflow.lib.export.trial import write_narrow_adapter
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.model.nf4_model import stored_buffers
from workflow.lib.quantization.nf4_checkpoint import write_plain_base
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError


def content(model):
    tensors = {name: (x.shape, x.dtype, x.device) for name, x in model.state_dict().items()}
    modules = {path: (type(module), vars(module).keys()) for path, module in model.named_modules()}
    return tensors, modules, json.dumps(model.config.to_dict(), default=str)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_nothing_that_reads_the_model_without_values_changes_it(family, tmp_path):
    checkpoint = Checkpoint.open(tiny_family(family, tmp_path / "model"))
    before = content(checkpoint.model)
    describe_checkpoint(checkpoint)
    write_plain_base(checkpoint, tmp_path / "nf4", QuantizeConfig())
    write_narrow_adapter(checkpoint, tmp_path / "adapter")
    load_base(
        checkpoint, device=torch.device("cpu"), compute_dtype=torch.float32, attention="eager"
    )
    assert content(checkpoint.model) == before


def without_config(folder):
    (folder / "config.json").unlink()


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_settings(**settings):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def changed_after_the_download(folder):
    recorded_as_download(folder)
    with_settings(vocab_size=7)(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_config, "it has no config.json"),
        (without_weights, "it has no weights, neither model.safetensors"),
        (cut_short, "is not a whole safetensors file: its header promises"),
        (with_settings(num_hidden_layers=10**6), "num_hidden_layers = 1000000: must be at most"),
        (with_settings(quantization_config=[1]), "it must be an object or null"),
        (changed_after_the_download, "config.json is damaged: it does not have the SHA-256"),
    ],
)
def test_folder_is_refused_when_it_is_opened(change, words, tmp_path):
    change(tiny_llama(tmp_path))
    with pytest.raises(UserError, match=words):
        Checkpoint.open(tmp_path)


def test_engine_reads_nf4_as_stored_and_other_formats_in_16_bits(tmp_path):
    published = Checkpoint(integer_checkpoint(tmp_path / "model", "gptq"))
    base = Checkpoint(quantized(published.folder, tmp_path / "nf4"))
    linear = "model.layers.0.mlp.down_proj"
    with published.reader() as decoded, base.reader() as stored:
        assert decoded.dtype(f"{linear}.weight") == "BF16"
        assert f"{linear}.scales" not in decoded
        assert stored.dtype(f"{linear}.weight") == "U8"
        assert f"{linear}.weight.absmax" in stored


def test_model_that_is_changed_is_another_one(tmp_path):
    checkpoint = Checkpoint(tiny_mixture("qwen3_moe", tmp_path))
    before = content(checkpoint.model)
    other = checkpoint.build(torch.float32)
    other.config.vocab_size = 1
    del other.model.layers[0]
    assert content(checkpoint.model) == before


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = ("equal", "different", "no embedding", "no head")


def rewrite(folder, tensors, **config):
    """Save tensors, and changes of config.json; None removes a key."""
    plain = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | config
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def with_tables(tensors, tables, *, embedding):
    tensors[HEAD] = tensors[embedding].clone()
    if tables == "different":
        tensors[HEAD] += 1
    elif tables != "equal":
        del tensors[embedding if tables == "no embedding" else HEAD]


def assert_as_stock(folder):
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = Checkpoint(folder).build(torch.float32)
    assert is_tied(model) == is_tied(stock)
    assert describe_checkpoint(Checkpoint.open(folder)).tied_embeddings == is_tied(stock)
    assert bool(Checkpoint(folder).plain_config.get("tie_word_embeddings", True)) >= is_tied(stock)
    with Checkpoint(folder).weights() as reader:
        for name, param in stock.named_parameters():
            assert torch.equal(reader.tensor(name), param), name


@pytest.mark.parametrize(("tied", "tables"), [*product((True, False), TABLES)])
def test_embedding_and_head_are_tied_as_transformers_ties_them(tmp_path, tied, tables):
    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    with_tables(tensors, tables, embedding=EMBEDDING)
    rewrite(folder, tensors, tie_word_embeddings=tied)
    if not tied and tables in ("no embedding", "no head"):
        lost = EMBEDDING if tables == "no embedding" else HEAD
        with pytest.raises(UserError, match=f"has no tensor {lost}"):
            describe_checkpoint(Checkpoint.open(folder))
        return
    assert_as_stock(folder)


@pytest.mark.parametrize("tables", ["equal", "different", "no head"])
def test_ties_of_a_model_and_of_its_text_part_are_read_as_transformers_reads_them(tmp_path, tables):
    folder = tiny_family("gemma3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    with_tables(tensors, tables, embedding=embedding)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for whole, part in product((True, False, None), repeat=2):
        own = {k: v for k, v in text.items() if k != "tie_word_embeddings"}
        own |= {} if part is None else {"tie_word_embeddings": part}
        rewrite(folder, tensors, tie_word_embeddings=whole, text_config=own)
        if tables == "no head" and not is_tied(Checkpoint(folder).build(torch.float32)):
            with pytest.raises(UserError, match="has no tensor lm_head"):
                describe_checkpoint(Checkpoint.open(folder))
            continue
        assert_as_stock(folder)


def ignored_names():
    found = {}
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model: Any = getattr(transformers, name if isinstance(name, str) else name[0])
        patterns = [
            x for x in model._keys_to_ignore_on_load_unexpected or () if "inv_freq" not in x
        ]
        found[family] = [_example(pattern) for pattern in patterns]
    return {family: names for family, names in found.items() if names}


def _example(pattern):
    plain = re.sub(r"\([^)]*\)\??", "", pattern).replace("^", "").replace(r"\d+", "3")
    plain = plain.replace("\\", "").replace(".*", "").removesuffix("$").removesuffix(".")
    name = f"{plain}.eh_proj.weight"
    assert re.search(pattern, name), (pattern, name)
    return name


# Families with such a list that are trained, and whose tiny model is easily made.
OTHERS = {"hy_v3": MOE | {"mlp_layer_types": ["dense", "sparse"]}}
IGNORED = {
    family: names
    for family, names in ignored_names().items()
    if family in FAMILIES or family in OTHERS
}


def extra_tensors(names):
    draw = torch.Generator().manual_seed(7)
    types = (torch.float16, torch.float32)
    return {n: torch.randn(5, 7, generator=draw).to(types[k % 2]) for k, n in enumerate(names)}


@pytest.mark.parametrize(("family", "names"), IGNORED.items(), ids=IGNORED)
def test_what_a_family_ignores_is_no_part_of_the_model(tmp_path, caplog, family, names):
    folder = (
        tiny_family(family, tmp_path)
        if family in FAMILIES
        else tiny_model(AutoConfig.for_model(family, **(SIZES | OTHERS[family])), tmp_path)
    )
    extra = extra_tensors(names)
    rewrite(folder, load_file(folder / "model.safetensors") | extra)
    with caplog.at_level("INFO", logger="workflow"):
        assert describe_checkpoint(Checkpoint.open(folder)).left_tensors == len(extra)
    (record,) = (x for x in caplog.records if "the model has no part for" in x.message)
    assert record.levelname == "INFO"
    model = Checkpoint(folder).build(torch.bfloat16)
    with Checkpoint(folder).weights() as reader:
        assert sorted(reader.left) == sorted(extra)
        assert {*reader.names()} == {*dict(model.named_parameters()), *dict(stored_buffers(model))}


NEXT = "model.layers.2.eh_proj.weight"  # behind the two layers of the tiny mixtures


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_of_multi_token_prediction_that_config_json_counts_are_left(tmp_path, family):
    folder = tiny_mixture(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layer = {n.replace(".1.", ".2.", 1): x for n, x in tensors.items() if ".layers.1." in n}
    rewrite(folder, tensors | layer | extra_tensors([NEXT]), num_nextn_predict_layers=1)
    assert describe_checkpoint(Checkpoint.open(folder)).left_tensors == len(layer) + 1
    rewrite(folder, tensors | layer | extra_tensors([NEXT]), num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=r"decoder layer 2, but config\.json says num_hidden_lay"):
        describe_checkpoint(Checkpoint.open(folder))


def test_what_no_list_of_the_family_has_is_told_as_a_warning(tmp_path, caplog):
    folder = tiny_llama(tmp_path)
    bias = "model.layers.1.self_attn.q_proj.bias"
    rewrite(folder, load_file(folder / "model.safetensors") | {bias: torch.ones(80)})
    assert describe_checkpoint(Checkpoint.open(folder)).left_tensors == 1
    (record,) = (x for x in caplog.records if x.levelname == "WARNING")
    assert f"for 1 tensors of the checkpoint ({bias} first)" in record.message


def test_layer_that_is_left_of_a_packed_checkpoint_is_decoded(tmp_path):
    """As all else of a merged model, whose config.json says nothing of FP8."""
    folder = fp8_checkpoint(tmp_path, block_size=(16, 16), family="deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    packed = "model.layers.1.self_attn.o_proj.weight"
    left = packed.replace(".1.", ".61.")
    tensors |= {left: tensors[packed], f"{left}_scale_inv": tensors[f"{packed}_scale_inv"]}
    rewrite(folder, tensors)
    assert describe_checkpoint(Checkpoint.open(folder)).left_tensors == 1
    with (
        Checkpoint(folder).weights() as reader,
        Checkpoint(folder).decoded() as stored,
    ):
        assert reader.left == [left]
        assert torch.equal(stored.tensor(left), reader.tensor(packed))


def test_what_is_left_is_in_the_merged_model_as_it_is_stored(tmp_path):
    folder = tiny_mixture("glm4_moe", tmp_path / "model", dtype=torch.bfloat16)
    extra = extra_tensors([NEXT, "model.layers.2.enorm.weight", "model.layers.46.hnorm.weight"])
    extra["model.layers.2.counts"] = torch.arange(5)
    rewrite(folder, load_file(folder / "model.safetensors") | extra, num_nextn_predict_layers=1)
    base = quantized(folder, tmp_path / "nf4")
    with Checkpoint(folder).weights() as original, Checkpoint(base).decoded() as nf4:
        assert not {*extra} & {*nf4.names()}
        merged = merged_tensors({}, {}, original=original, nf4=nf4, onto="original")
        assert not {*extra} & {*dict(merged)}
        found = dict(original.untrained([]))
    assert found.keys() == extra.keys()
    for name, tensor in extra.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name

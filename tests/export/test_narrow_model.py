"""A narrow model of a family: few weights, with the original's modules and token ids."""

import pytest
import torch
from transformers import AutoConfig

from tests.support.llama_cpp_model import save_spm_tokenizer
from tests.support.mixtures import tiny_mixture
from tests.support.models import tiny_llama
from workflow.lib.export.narrow_model import narrow_, write_narrow_adapter, write_narrow_model
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.nf4_model import build_config_on_meta
from workflow.lib.settings.config import LoraSettings

LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
ODD = {"num_attention_heads": 71, "hidden_size": 4544}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", LLAMA_405B), ("llama", SMOL), ("falcon", ODD)]
    + [(name, {}) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_neox", "glm4_moe")],
)
def test_narrow_model_has_all_modules_and_few_weights(family, sizes):
    config = AutoConfig.for_model(family, **sizes)
    whole = build_config_on_meta(config, dtype=torch.bfloat16)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow_(config)
    narrow = build_config_on_meta(config, dtype=torch.bfloat16)
    assert [name for name, _ in narrow.named_modules()] == [n for n, _ in whole.named_modules()]
    assert narrow.get_input_embeddings().weight.shape[0] == config.vocab_size
    found = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert found == head_dim
    assert sum(p.numel() for p in narrow.parameters()) < 300e6


@pytest.mark.parametrize(
    ("source", "lora"),
    [
        (tiny_llama, {"r": 3, "use_dora": True}),
        (tiny_llama, {"r": 3, "rank_pattern": {"q_proj": 7}, "modules_to_save": ["lm_head"]}),
        (lambda folder: tiny_mixture("qwen3_moe", folder), {"r": 3}),
    ],
)
def test_stock_packages_load_the_adapter_and_it_acts(source, lora, tmp_path):
    source(tmp_path / "source")
    save_spm_tokenizer(tmp_path / "source")
    write_narrow_model(tmp_path / "source", tmp_path / "model", dtype=torch.float32)
    rank = write_narrow_adapter(tmp_path / "model", LoraSettings(**lora), tmp_path / "adapter")
    assert rank == max(lora["r"], *lora.get("rank_pattern", {}).values(), 0)
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    model = load_base(tmp_path / "model", attention="eager", **options)
    ids = torch.tensor([[3, 5, 8, 13, 21]])
    plain = model(input_ids=ids).logits
    tuned = load_adapter(model, tmp_path / "adapter")
    assert not torch.equal(tuned(input_ids=ids).logits, plain)

"""What families ask of their attention, from the config.json that Transformers writes for them."""

import json

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    GPTJConfig,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    NemotronConfig,
    Qwen3Config,
    SeedOssConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.attention_needs import WITH_SINKS, WITHOUT_SDPA, attention_needs
from workflow.lib.kernels.attention.attention_choice import AttentionNeeds

NEEDS = [
    (LlamaConfig(hidden_size=96, num_attention_heads=2), AttentionNeeds(head_dim=48, value_dim=48)),
    (Qwen3Config(attention_dropout=0.1), AttentionNeeds(dropout=0.1)),
    (Gemma2Config(), AttentionNeeds(softcap=True, no_sdpa=True, head_dim=256, value_dim=256)),
    (
        Gemma2Config(attn_logit_softcapping=None),
        AttentionNeeds(no_sdpa=True, head_dim=256, value_dim=256),
    ),
    (Gemma3Config(), AttentionNeeds(head_dim=256, value_dim=256)),
    (GptOssConfig(), AttentionNeeds(sinks=True, masks_of_rows=True, head_dim=64, value_dim=64)),
    (Llama4Config(), AttentionNeeds(chunks=True)),
    (NemotronConfig(), AttentionNeeds(masked=True)),
    (DeepseekV3Config(), AttentionNeeds(head_dim=192, value_dim=128)),
    (SeedOssConfig(), AttentionNeeds(dropout=0.1, head_dim=128, value_dim=128)),
    (GPTJConfig(), AttentionNeeds(eager_alone=True, no_sdpa=True, head_dim=0, value_dim=0)),
]


@pytest.mark.parametrize(("config", "needs"), NEEDS)
def test_needs_of_a_family(config, needs, tmp_path):
    config.save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).attention_needs == needs


@pytest.mark.parametrize("config", [config for config, _ in NEEDS])
def test_what_a_config_leaves_out_is_what_its_class_says(config, tmp_path):
    """Seed-OSS drops attention weights by default, and Gemma 2 caps scores."""
    left_out = type(config)()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": left_out.model_type}))
    assert Checkpoint(tmp_path).attention_needs == attention_needs(left_out.to_dict())


@pytest.mark.parametrize(
    "config",
    [
        SeedOssConfig(num_hidden_layers=1, hidden_size=64, vocab_size=11, intermediate_size=32),
        GPTJConfig(n_layer=1, n_embd=64, n_head=4, vocab_size=11, attn_pdrop=0.2, rotary_dim=16),
        Qwen3Config(num_hidden_layers=1, vocab_size=11, attention_dropout=0.3),
    ],
    ids=lambda config: config.model_type,
)
def test_no_attention_weight_is_dropped_unless_the_family_is_asked_for(config, tmp_path):
    """By whatever name the family has it."""
    config.save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).attention_needs.dropout > 0
    built = [
        Checkpoint(tmp_path).build(torch.bfloat16, attention_dropout=drops).config
        for drops in (True, False)
    ]
    assert [attention_needs(x.to_dict()).dropout > 0 for x in built] == [True, False]


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"kv_lora_rank": 512}])
def test_config_that_says_little_is_read(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not Checkpoint(tmp_path).attention_needs.softcap


NO_DECODERS = {
    *("big_bird", "bigbird_pegasus", "cpmant", "git", "got_ocr2", "megatron-bert", "mvp"),
    *("openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "trocr", "xlm", "xlnet"),
}


def test_classes_that_rule_sdpa_out_are_known():
    classes = {
        family: MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NO_DECODERS
    }
    ruled_out = {family for family, kind in classes.items() if not kind._supports_sdpa}
    assert ruled_out - WITH_SINKS <= WITHOUT_SDPA
    some_versions = {"codegen", "gptj", "gemma2", "vaultgemma"}  # sdpa from 5.24 on; in 5.17
    assert WITHOUT_SDPA & classes.keys() - ruled_out <= some_versions

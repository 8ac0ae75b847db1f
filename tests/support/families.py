"""One tiny random model of each family that is tested, with odd sizes on purpose.

The table is the only one: tests and the page `workflow/docs/families.csv` read it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from workflow.lib.checkpoints.meta_model import auto_class

VOCAB = 97
WINDOW = 5  # of sliding attention, shorter than documents
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
SHARED_EXPERT = MOE | {"shared_expert_intermediate_size": 64}
ROUTED_IN_GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 3,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
MULTIPLIERS = {
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA4 = GEMMA | {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
MAMBA_2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [4.0 + n for n in range(8)],
}
NEMOTRON_H = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
}


TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VISION = TOWER | {"image_size": 28, "patch_size": 14}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}


def multimodal(
    model_type: str, vision: dict[str, Any], *, tied: bool = False, **text: Any
) -> dict[str, Any]:
    """Return what a tiny multimodal model is made of, given its decoder's type and settings."""
    tie = {"tie_word_embeddings": tied}
    return tie | {
        "text_config": SIZES | {"model_type": model_type} | text | tie,
        "vision_config": VISION | vision,
        "image_token_id": 1,
    }


@dataclass(frozen=True)
class FamilyCase:
    """A family of models, and what its tiny one is made of besides `SIZES`."""

    has: str
    """What this family has that others have not."""
    changes: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    """As Transformers calls it; None: by the table's name of it."""

    def config(self, family: str) -> Any:
        """Return the configuration of the tiny model."""
        sizes = {} if "text_config" in self.changes else SIZES
        return AutoConfig.for_model(self.model_type or family, **(sizes | self.changes))


FAMILIES: dict[str, FamilyCase] = {
    "llama": FamilyCase("the plain case"),
    "mistral": FamilyCase("a sliding window in all layers", {"sliding_window": WINDOW}),
    "ministral3": FamilyCase(
        "queries scaled by position",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "qwen2": FamilyCase("biases of queries, keys and values"),
    "qwen3": FamilyCase("norms of queries and keys"),
    "phi3": FamilyCase("fused projections"),
    "gemma": FamilyCase("norms with 1 + w, scaled embedding", {"tie_word_embeddings": True}),
    "gemma2": FamilyCase("soft-capped scores and logits", GEMMA | ALTERNATING),
    "gemma3_text": FamilyCase("two rotary tables", GEMMA | ALTERNATING),
    "gemma3": FamilyCase(
        "a vision tower, which is left as it is",
        {
            "text_config": SIZES | GEMMA | ALTERNATING,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_text": FamilyCase(
        "wider heads in full layers, embeddings of each layer, keys and values of earlier layers",
        GEMMA4,
    ),
    "gemma4": FamilyCase(
        "a vision tower, which is left as it is",
        {
            "text_config": SIZES | GEMMA4,
            "vision_config": TOWER
            | {
                "num_key_value_heads": 2,
                "head_dim": 12,
                "patch_size": 14,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": 1,
            "video_token_id": 2,
            "audio_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": FamilyCase(
        "no text class of its own", multimodal("mistral", {"model_type": "pixtral", "head_dim": 12})
    ),
    "qwen2_5_vl": FamilyCase(
        "positions of three axes, of which text has one",
        multimodal(
            "qwen2_5_vl_text",
            {"out_hidden_size": 48, "depth": 1, "num_heads": 2, "fullatt_block_indexes": [0]},
            **AXES,
        ),
    ),
    "qwen3_vl": FamilyCase(
        "such positions by turns, tied to the embedding",
        multimodal(
            "qwen3_vl_text",
            {"out_hidden_size": 48, "depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0]},
            tied=True,
            **AXES,
        ),
    ),
    "qwen3_vl_moe": FamilyCase(
        "experts in one tensor, published transposed",
        multimodal(
            "qwen3_vl_moe_text",
            {"out_hidden_size": 48, "depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0]},
            **AXES,
            **MOE,
        ),
    ),
    "minimax_m3_vl": FamilyCase(
        "a fused gate, published in two tensors",
        multimodal(
            "minimax_m3_vl_text",
            {},
            **MOE,
            num_local_experts=5,
            shared_intermediate_size=64,
            dense_intermediate_size=80,
            mlp_layer_types=["dense", "sparse"],
        ),
    ),
    "granite_speech": FamilyCase(
        "a model without Transformers' switch of recomputation",
        {
            "text_config": SIZES | MULTIPLIERS | {"model_type": "granite"},
            "encoder_config": {"hidden_dim": 24, "num_layers": 1, "num_heads": 2, "dim_head": 12},
            "projector_config": TOWER | {"encoder_hidden_size": 24},
            "tie_word_embeddings": False,
        },
    ),
    "idefics3": FamilyCase("a text part of another name", multimodal("llama", {})),
    "voxtral": FamilyCase(
        "ears in place of eyes",
        {
            "text_config": SIZES | {"model_type": "llama"},
            "audio_config": TOWER,
            "audio_token_id": 1,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": FamilyCase("norms after attention and feed-forward"),
    "olmo3": FamilyCase("sliding layers with norms after them", ALTERNATING),
    "smollm3": FamilyCase("layers without positions", {"no_rope_layer_interval": 2}),
    "granite": FamilyCase("four multipliers", MULTIPLIERS),
    "exaone4": FamilyCase("positions in sliding layers only", ALTERNATING),
    "seed_oss": FamilyCase(
        "biases, dropout of residuals", {"attention_dropout": 0.0, "residual_dropout": 0.0}
    ),
    "ernie4_5": FamilyCase("rotation of neighbouring dimensions"),
    "hunyuan_v1_dense": FamilyCase("norms of queries and keys after rotation"),
    "apertus": FamilyCase("an activation with parameters"),
    "arcee": FamilyCase("a feed-forward by relu squared, without a gate"),
    "glm": FamilyCase("half of each head rotated, fused gate", {"partial_rotary_factor": 0.5}),
    "glm4": FamilyCase("four norms a layer", {"partial_rotary_factor": 0.5}),
    "cohere": FamilyCase("attention beside feed-forward", {"logit_scale": 0.25}),
    "cohere2": FamilyCase("no positions in full layers", ALTERNATING | {"logit_scale": 0.25}),
    "stablelm": FamilyCase(
        "LayerNorm with bias, a quarter of each head rotated", {"partial_rotary_factor": 0.25}
    ),
    "nemotron": FamilyCase("LayerNorm with 1 + w, relu squared", {"partial_rotary_factor": 0.5}),
    "starcoder2": FamilyCase("LayerNorm, biases everywhere", {"sliding_window": WINDOW}),
    "gpt_neox": FamilyCase("one projection for all heads", {"rotary_pct": 0.25}),
    "qwen3_5_text": FamilyCase("Gated DeltaNet", LINEAR),
    "olmo_hybrid": FamilyCase(
        "Gated DeltaNet of three convolutions",
        LINEAR | {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ),
    "lfm2": FamilyCase(
        "short convolutions", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}
    ),
    "falcon_h1": FamilyCase(
        "Mamba 2 beside attention, multipliers in the feed-forward",
        MAMBA_2
        | {
            "mlp_multipliers": [0.7, 0.3],
            "mamba_d_ssm": 48,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
        },
    ),
    "nemotron_h": FamilyCase(
        "Mamba 2, attention and feed-forward as layers of their own",
        NEMOTRON_H | {"layers_block_type": ["mamba", "attention", "mlp"]},
    ),
    "gemma4_moe": FamilyCase(
        "experts beside a dense feed-forward, keys that are values too",
        GEMMA
        | ALTERNATING
        | {
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 80,
        },
        model_type="gemma4_text",
    ),
    "nemotron_h_moe": FamilyCase(
        "Mamba 2, attention and experts without a gate as layers of their own",
        NEMOTRON_H
        | ROUTED_IN_GROUPS
        | {
            "layers_block_type": ["mamba", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 64,
        },
        model_type="nemotron_h",
    ),
    "qwen3_moe": FamilyCase("experts", MOE),
    "mixtral": FamilyCase(
        "experts, published one by one", LOCAL_EXPERTS | {"sliding_window": WINDOW}
    ),
    "olmoe": FamilyCase("three experts a token", {"num_experts": 5, "num_experts_per_tok": 3}),
    "gpt_oss": FamilyCase(
        "experts with biases, transposed and interleaved, attention sinks",
        ALTERNATING
        | LOCAL_EXPERTS
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "glm4_moe": FamilyCase(
        "a dense layer, then shared and routed experts in groups", ROUTED_IN_GROUPS
    ),
    "glm4_moe_lite": FamilyCase(
        "experts and latent attention in layers by name",
        ROUTED_IN_GROUPS | LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "granitemoe": FamilyCase("experts with four multipliers", MULTIPLIERS | LOCAL_EXPERTS),
    "afmoe": FamilyCase(
        "masks that leave out where documents begin, gated attention",
        ALTERNATING
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "num_dense_layers": 1,
        },
    ),
    "granitemoehybrid": FamilyCase(
        "Mamba 2, a shared expert beside experts published under other names",
        LOCAL_EXPERTS
        | MAMBA_2
        | {"shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "jamba": FamilyCase(
        "Mamba, whose layers ask whether their weights are quantized",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 6,
        },
    ),
    "zaya": FamilyCase(
        "convolutions that make queries, keys and values",
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 80,
            "layer_types": ["hybrid", "hybrid_sliding"],
            "sliding_window": WINDOW,
        },
    ),
    "deepseek_v3": FamilyCase("experts in groups, latent attention", ROUTED_IN_GROUPS | LATENT),
    "qwen3_5_moe_text": FamilyCase("Gated DeltaNet, a gated shared expert", SHARED_EXPERT | LINEAR),
    "qwen3_next": FamilyCase("the same, with fewer and wider projections", SHARED_EXPERT | LINEAR),
    "ernie4_5_moe": FamilyCase(
        "experts chosen by corrected scores",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 80,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
}

KINDS = {
    "llama": "plain",
    "qwen2": "biases",
    "olmo2": "post-norms",
    "phi3": "fused projections",
    "gemma2": "soft-caps",
    "gpt_oss": "sinks",
    "mistral": "sliding windows",
    "deepseek_v3": "latent attention",
    "qwen3_moe": "experts",
    "qwen3_vl_moe": "experts in one tensor",
    "minimax_m3_vl": "linears in several tensors",
    "granite_speech": "a switch of its own",
    "glm4_moe": "a shared expert",
    "qwen3_5_text": "a delta rule",
    "nemotron_h": "Mamba 2",
}
"""Kinds of layer by the family that every change is tested with; the others are nightly."""


def by_kind(families: Iterable[str] = FAMILIES, kinds: Iterable[str] = KINDS) -> list[Any]:
    """Return parameters of a test, of which those that are no `kinds` are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in set(kinds) else slow) for name in families]


RECURRENT = ("qwen3_5_text", "olmo_hybrid", "lfm2", "falcon_h1", "nemotron_h")
RECURRENT_EXPERTS = (
    "nemotron_h_moe",
    "granitemoehybrid",
    "jamba",
    "zaya",
    "qwen3_5_moe_text",
    "qwen3_next",
)


def tiny_family(family: str, folder: Path, *, vocab_size: int = VOCAB) -> Path:
    """Save the tiny model of a family to `folder`; return `folder`."""
    config = FAMILIES[family].config(family)
    config.get_text_config().vocab_size = vocab_size
    return tiny_model(config, folder)


def tiny_model(config: Any, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model to `folder`, its norms and biases off their initial values; return
    `folder`."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *_stored_buffers(model)):
            if tensor.dim() <= 1 or name.endswith("bias"):
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.to(dtype).save_pretrained(folder)
    return folder


def _stored_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    ends = ("layer_scalar", "e_score_correction_bias")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends)]

"""Tiny configurations of decoders whose layers are not plain, for their description: experts,
latent attention, recurrent layers, sinks. Of those that `families` trains too, the sizes differ."""

from typing import Any

from tests.support.families import FAMILIES, RECURRENT, SIZES

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 3,
    "head_dim": None,
}
DELTA_NET = EXPERTS | {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 40,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SLIDING = ["sliding_attention", "full_attention"]
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": SLIDING},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": ROUTED | LATENT,
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "qwen3_next": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
}
"""Changes to `families.SIZES` by family."""
MIXTURES = tuple(CHANGES)
OTHERS = tuple(dict.fromkeys((*RECURRENT, *MIXTURES)))


def config_of(family: str) -> dict[str, Any]:
    if family not in CHANGES:
        content: dict[str, Any] = FAMILIES[family].config(family).to_dict()
        return content
    changed = SIZES | CHANGES[family] | {"model_type": family}
    return {key: value for key, value in changed.items() if value is not None}

"""Tiny random mixtures of experts, one of each way in which families keep and publish experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
SHARED = {"moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    # 11 experts: the name of the eleventh sorts before that of the third
    "qwen3_moe": {"num_experts": 11, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 3, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 16},
    "glm4_moe": SHARED | {"n_routed_experts": 5, "n_group": 1, "topk_group": 1},
    "deepseek_v3": SHARED
    | {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
MORE_MIXTURES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 5, "intermediate_size": 48, "num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 5, "intermediate_size": 48},
    "ernie4_5_moe": {
        "moe_num_experts": 5,
        "moe_intermediate_size": 48,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "qwen2_moe": {
        "num_experts": 5,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_next": {
        "num_experts": 5,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Others whose routers are not those of the above."""


def tiny_mixture(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """Save the tiny mixture of a family to `folder` as the family publishes its own, norms and
    biases off their initial values; return `folder`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SIZES | (MIXTURES | MORE_MIXTURES)[family] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *_correction_biases(model)):
            if tensor.dim() == 1 or not tensor.any():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.to(dtype).save_pretrained(folder)
    return folder


def _correction_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]

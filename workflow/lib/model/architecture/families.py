"""How the decoder layers of each supported family are built, as tables: what config.json says,
tensor by tensor.

Dimensions by letter: h hidden, q query heads x head_dim, k key-value heads x head_dim, d head_dim,
f feed-forward. Linears are (out_features, in_features). Read from Transformers 5.23,
`models/<family>`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SPLIT_LINEARS = {
    "self_attn.q_proj": ("q", "h"),
    "self_attn.k_proj": ("k", "h"),
    "self_attn.v_proj": ("k", "h"),
    "self_attn.o_proj": ("h", "q"),
    "mlp.gate_proj": ("f", "h"),
    "mlp.up_proj": ("f", "h"),
    "mlp.down_proj": ("h", "f"),
}
FUSED_LINEARS = {
    "self_attn.qkv_proj": ("q+2k", "h"),
    "self_attn.o_proj": ("h", "q"),
    "mlp.gate_up_proj": ("2f", "h"),
    "mlp.down_proj": ("h", "f"),
}

TWO_NORMS = {"input_layernorm.weight": "h", "post_attention_layernorm.weight": "h"}
FOUR_NORMS = TWO_NORMS | {
    "pre_feedforward_layernorm.weight": "h",
    "post_feedforward_layernorm.weight": "h",
}
HEAD_NORMS = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
QKV_BIASES = {
    "self_attn.q_proj.bias": "q",
    "self_attn.k_proj.bias": "k",
    "self_attn.v_proj.bias": "k",
}
OLMO2_VECTORS = {
    "post_attention_layernorm.weight": "h",
    "post_feedforward_layernorm.weight": "h",
    "self_attn.q_norm.weight": "q",
    "self_attn.k_norm.weight": "k",
}
# Biases that a switch of config.json brings, where the family has the switch.
OPTIONAL_BIASES = {
    "attention_bias": QKV_BIASES | {"self_attn.o_proj.bias": "h"},
    "mlp_bias": {"mlp.gate_proj.bias": "f", "mlp.up_proj.bias": "f", "mlp.down_proj.bias": "h"},
}


@dataclass(frozen=True)
class Family:
    """How one `model_type` of config.json is built."""

    linears: Mapping[str, tuple[str, str]]
    vectors: Mapping[str, str]
    """The 1-D tensors of a layer that every model of the family has, and their length by letter."""
    hidden_norms: int = 2  # norms over the hidden size in a layer
    qk_norm: bool = False
    tied_by_default: bool = False
    needs_head_dim: bool = False  # its default is not hidden_size / num_attention_heads


FAMILIES = {
    "llama": Family(SPLIT_LINEARS, TWO_NORMS),
    "mistral": Family(SPLIT_LINEARS, TWO_NORMS),
    "qwen2": Family(SPLIT_LINEARS, TWO_NORMS | QKV_BIASES),
    "qwen3": Family(SPLIT_LINEARS, TWO_NORMS | HEAD_NORMS, qk_norm=True, needs_head_dim=True),
    "phi3": Family(FUSED_LINEARS, TWO_NORMS),
    "gemma2": Family(
        SPLIT_LINEARS, FOUR_NORMS, hidden_norms=4, tied_by_default=True, needs_head_dim=True
    ),
    "gemma3_text": Family(
        SPLIT_LINEARS,
        FOUR_NORMS | HEAD_NORMS,
        hidden_norms=4,
        qk_norm=True,
        tied_by_default=True,
        needs_head_dim=True,
    ),
    "olmo2": Family(SPLIT_LINEARS, OLMO2_VECTORS, qk_norm=True),
}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

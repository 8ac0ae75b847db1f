"""Configurations of tiny decoders whose layers are not plain, for their description: those of
`families`, and some mixtures more."""

from typing import Any

from tests.support.families import FAMILIES, LATENT, MOE, RECURRENT, ROUTED_IN_GROUPS, SIZES

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 40},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2},
    "deepseek_v2": ROUTED_IN_GROUPS | LATENT,
    "lfm2_moe": MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
"""Changes to `families.SIZES` by family."""
IN_GROUPS = ("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3")
MIXTURES = (
    *CHANGES,
    *("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "ernie4_5_moe", "glm4_moe"),
    *("glm4_moe_lite", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"),
)
OTHERS = (*RECURRENT, *CHANGES)


def config_of(family: str) -> dict[str, Any]:
    if family in CHANGES:
        return SIZES | CHANGES[family] | {"model_type": family}
    return FAMILIES[family].config(family).to_dict()

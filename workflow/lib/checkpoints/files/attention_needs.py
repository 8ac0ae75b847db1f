"""A model's needs of its attention, from its config.json as Transformers completes it."""

from collections.abc import Mapping
from typing import Any

from workflow.lib.kernels.attention.attention_choice import AttentionNeeds

# Families whose layers pass sinks to their attention function (`s_aux` in Transformers 5.23). For a
# family that is missing here, varlen and flex say so when it does.
WITH_SINKS = frozenset(
    {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter"}
)
# Families whose layers pass none of a forward's arguments to their attention (5.23). varlen and
# flex say so of any other.
MASKED = frozenset({"nemotron", "stablelm"})
# Families whose masks of sdpa and eager ignore positions (5.23): in packed rows they miss the
# starts of documents. The check before the first step refuses any other such family.
MASKS_OF_ROWS = frozenset({"afmoe", "gpt_oss", "granitemoehybrid"})
# Families whose layers compute all scores themselves, with any attention setting (5.24; codegen and
# gptj up to 5.23).
EAGER_ALONE = frozenset(
    {
        *("bloom", "codegen", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "xglm"),
        *("inkling2_loop_text", "inkling2_text"),
    }
)
# Those, and families whose class excludes sdpa for another reason than sinks: some for a soft cap
# that a config.json may leave out, some have no attention.
WITHOUT_SDPA = EAGER_ALONE | {
    *("deepseek_v4", "falcon_mamba", "flint", "gemma2", "hy_v4", "mamba", "mamba2", "rwkv"),
    *("vaultgemma", "xlstm"),
}
# Names in configurations of Transformers (5.23) of the share of dropped attention weights.
ATTENTION_DROPOUT = (
    "attention_dropout",
    "attn_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
)


def attention_needs(config: Mapping[str, Any]) -> AttentionNeeds:
    """Return the attention needs of the model of a config.json or of its text part."""
    config = config.get("text_config") or config
    kinds = config.get("layer_types") or ()
    head_dim, value_dim = _widths(config)
    return AttentionNeeds(
        softcap=config.get("attn_logit_softcapping") is not None,
        sinks=config.get("model_type") in WITH_SINKS,
        chunks="chunked_attention" in kinds or config.get("model_type") == "llama4_text",
        head_dim=head_dim,
        value_dim=value_dim,
        dropout=attention_dropout(config),
        masked=config.get("model_type") in MASKED,
        **family_needs(config.get("model_type")),
    )


def attention_dropout(config: Mapping[str, Any]) -> float:
    """Return the share of attention weights that training drops, under any of its names."""
    return max(float(config.get(name) or 0.0) for name in ATTENTION_DROPOUT)


def family_needs(family: str | None) -> dict[str, bool]:
    """Return the needs that neither a config.json nor the layers of a description show."""
    return {
        "masks_of_rows": family in MASKS_OF_ROWS,
        "eager_alone": family in EAGER_ALONE,
        "no_sdpa": family in WITHOUT_SDPA,
    }


def _widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widest of queries and keys, and the width of values. Keys of latent attention have
    two parts (DeepSeek-V2, arXiv 2405.04434, sec. 2.1)."""
    if config.get("kv_lora_rank") is not None:
        keys = config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64)
        return int(keys), int(config.get("v_head_dim", 128))
    width = config.get("head_dim") or 0
    if not width and config.get("num_attention_heads"):
        width = config.get("hidden_size", 0) // config["num_attention_heads"]
    layers = (config.get("per_layer_config") or {}).values()  # as Transformers saves Gemma 4
    others = (config.get("global_head_dim"), *(layer.get("head_dim") for layer in layers))
    width = max(width, *(other or 0 for other in others))
    return width, width

"""A narrow random model of a family, and an adapter of a run's settings on it, in their exported
form: a server that refuses these before the training would refuse the real ones.

All layers, token ids and head sizes are the original's, so settings mean the same modules. One
factor reduces widths: hidden and intermediate sizes, and numbers of heads; experts are fewer, too.
Packed weights of the published model are plain here."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from workflow.lib.export.peft_folder import Trained, save_exported
from workflow.lib.model.architecture.adapter_targets import adapter_scale
from workflow.lib.model.architecture.stack_names import PREFIX
from workflow.lib.model.decoder_layers import drop_other_parts_
from workflow.lib.model.lora import adapter_config, inject_adapters, trainable_parameters
from workflow.lib.model.nf4_model import auto_class, build_on_meta
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.quantization.nf4_checkpoint import (
    copy_companions,
    packed_on_meta,
    read_model_config,
)
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.files import write_json

WIDTH, STEP = 256, 32  # of the hidden size, roughly; widths are whole steps of kernels if possible
WIDTHS = r"hidden_size|d_model|n_embd|n_inner|ffn_dim|(\w+_)?(intermediate_size|ffn_hidden_size)"
HEADS = r"(\w+_)?(num|n)_(\w+_)?heads?"
SHARED = r"\w*(key_value|kv)_heads"  # there may be fewer than others
EXPERTS = r"(moe_)?num(_local|_routed)?_experts|n_routed_experts"
CHOSEN = r"(num_)?(experts_per_tok(en)?|selected_experts)|moe_(topk|k)|top_k_experts|n_group"
EFFECT = 0.25  # of an adapter's change, as a share of the weight


def write_narrow_model(source: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write a random model of the family in `source` with its tokenizer."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", read_model_config(source))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    narrow_(config)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.save_pretrained(folder)
    copy_companions(source, folder)


def narrow_(config: PretrainedConfig) -> None:
    """Reduce widths, heads and experts of a configuration, in place."""
    text: Any = config.get_text_config()
    sizes = {n: v for n, v in text.to_dict().items() if type(v) is int and v > 0}
    widths, heads, experts, chosen = (
        {name: value for name, value in sizes.items() if re.fullmatch(pattern, name)}
        for pattern in (WIDTHS, HEADS, EXPERTS, CHOSEN)
    )
    hidden = text.hidden_size
    fitting = [by for by in range(1, hidden // STEP + 1) if _divides(heads, by)]
    if "head_dim" not in sizes:  # hidden size / heads
        fitting = [by for by in fitting if hidden % by == 0]
    by = min(fitting, key=lambda by: abs(hidden // by - WIDTH))
    for name, value in heads.items():
        setattr(text, name, max(value // by, 1))
    step = math.lcm(STEP, text.num_attention_heads)  # a family may require heads of a whole width
    for name, value in widths.items():
        exact = by == 1 or (
            value % by == 0 and (value // by % step == 0 or "head_dim" not in sizes)
        )
        setattr(text, name, value // by if exact else max(round(value / by / step), 1) * step)
    few = 2 * max(chosen.values(), default=1)
    for name, value in experts.items():
        setattr(text, name, min((n for n in range(few, value) if value % n == 0), default=value))
    if hasattr(text, "initializer_range"):
        text.initializer_range = text.hidden_size**-0.5  # logits of about one


def _divides(heads: dict[str, int], by: int) -> bool:
    return all(
        value % by == 0 or (by % value == 0 and re.fullmatch(SHARED, name))
        for name, value in heads.items()
    )


def write_narrow_adapter(model: Path, settings: LoraSettings, folder: Path) -> int:
    """Write a random adapter with a run's settings on the narrow model, and return its largest
    rank."""
    packed = build_on_meta(model, dtype=torch.float32)
    original = build_on_meta(model, dtype=torch.float32)
    drop_other_parts_(packed)
    tuned = inject_adapters(packed_on_meta(packed, dtype=torch.float32), settings)
    config = adapter_config(tuned) | {"base_model_name_or_path": str(model), "revision": None}
    adapter = _drawn(tuned, config)
    with CheckpointReader(model) as base:
        save_exported(Trained(adapter, config), folder, original=original, base=base)
    return int(max(config["r"], *config["rank_pattern"].values(), 0))


def _drawn(tuned: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return values of the trained tensors; the change is `EFFECT` times the size of a weight."""
    drawn = {}
    for name, parameter in trainable_parameters(tuned).items():
        path, _, part = name.removeprefix(PREFIX).partition(".lora_")
        values = torch.randn(parameter.shape)
        if part.startswith("B"):
            values *= EFFECT / (adapter_scale(config, path) * parameter.shape[1] ** 0.5)
        elif part.startswith("magnitude"):
            values = torch.ones_like(values)
        else:
            values *= parameter.shape[-1] ** -0.5
        drawn[name] = values
    return drawn

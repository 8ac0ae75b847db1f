"""A narrow random model of a family, with few layers, and an adapter on it in its exported form.

One factor reduces widths: hidden and intermediate sizes, and numbers of heads, whose sizes are the
original's. Experts and tokens are fewer, too. Packed weights of the published model are plain."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import drop_other_parts_
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.export.peft_folder import Trained, save_exported
from workflow.lib.model.adaptable_linears import note_without_adapter_
from workflow.lib.model.lora import adapter_config, inject_adapters, trainable_parameters
from workflow.lib.quantization.nf4_checkpoint import packed_on_meta
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.files import write_json

WIDTH, STEP = 64, 32  # of the hidden size, roughly; widths are whole steps of kernels if possible
WIDTHS = r"hidden_size|d_model|n_embd|n_inner|ffn_dim|(\w+_)?(intermediate_size|ffn_hidden_size)"
HEADS = r"(\w+_)?(num|n)_(\w+_)?heads?"
SHARED = r"\w*(key_value|kv)_heads"  # there may be fewer than others
EXPERTS = r"(moe_)?num(_local|_routed)?_experts|n_routed_experts"
CHOSEN = r"(num_)?(experts_per_tok(en)?|selected_experts)|moe_(topk|k)|top_k_experts|n_group"
LAYERS = r"(num|n)_(\w+_)?layers?|(\w+_)?layers|(\w+_)?depth"
TOKENS = r"vocab_size\w*|\w+_token_id"
VOCABULARY = 512


def plain_config(source: Checkpoint, folder: Path) -> PretrainedConfig:
    """Return the configuration of the model `source`, of plain weights; `folder` gets it too."""
    write_json(folder / "config.json", source.plain_config)
    return Checkpoint(folder).transformers_config()


def write_random(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.save_pretrained(folder)


def shorten_(config: PretrainedConfig, kept: int) -> None:
    """Keep the first `kept` decoder layers, one layer of each tower, and `VOCABULARY` tokens, in
    place."""
    text = config.get_text_config(decoder=True)
    for part in _parts(config):
        few = kept if part is text else 1
        for name, value in vars(part).items():
            if part in (config, text) and re.fullmatch(TOKENS, name) and type(value) is int:
                setattr(part, name, min(value, VOCABULARY - (not name.startswith("vocab"))))
        sizes = {n: v for n, v in vars(part).items() if re.fullmatch(LAYERS, n) and type(v) is int}
        count = getattr(part, "num_hidden_layers", max(sizes.values(), default=0))
        for name, value in [*vars(part).items()] if count > few else ():
            if name in sizes:  # of all layers, or of some, as those that share keys
                setattr(part, name, few if value == count else min(value, few // 2))
            elif isinstance(value, list) or (name.endswith("pattern") and isinstance(value, str)):
                setattr(part, name, value[:few] if len(value) == count else value)
        if by_layer := part.to_dict().get("per_layer_config"):  # Gemma 4's, which no attribute is
            part.per_layer_config = {n: x for n, x in by_layer.items() if int(n) < few}


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


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


def _divides(heads: dict[str, int], by: int) -> bool:
    return all(
        value % by == 0 or (by % value == 0 and re.fullmatch(SHARED, name))
        for name, value in heads.items()
    )


def write_narrow_adapter(model: Checkpoint, folder: Path) -> Trained:
    """Write a random adapter on all linears of the narrow model, and return it in the names of the
    training."""
    packed = model.build(torch.float32)
    note_without_adapter_(packed)
    drop_other_parts_(packed)
    tuned = inject_adapters(packed_on_meta(packed, dtype=torch.float32), LoraSettings())
    drawn = {name: torch.randn(x.shape) for name, x in trainable_parameters(tuned).items()}
    named = {"base_model_name_or_path": str(model.folder), "revision": None}
    adapter = Trained(drawn, adapter_config(tuned) | named)
    save_exported(adapter, folder, original=model, base=model)
    return adapter

"""What follows a training, tried on a narrow random model of the class before it.

The NF4 base and an adapter on all linears are loaded by stock packages, evaluated, and merged under
the published names. The trial has the first layers of all kinds, and takes about a second. One
factor reduces widths: hidden and intermediate sizes, and numbers of heads, whose sizes are the
original's. Experts and tokens are fewer, too. Packed weights of the published model are plain."""

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import drop_other_parts_
from workflow.lib.checkpoints.meta_model import auto_class, quiet_transformers, said_by
from workflow.lib.export.adapter_files import Trained, merged_model, save_exported
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.adaptable_linears import note_without_adapter_
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.lora import adapter_config, inject_adapters, trainable_parameters
from workflow.lib.quantization.nf4_checkpoint import packed_on_meta, write_plain_base
from workflow.lib.scores.scoring import kept_logits
from workflow.lib.settings.config import LoraSettings, QuantizeConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_json

IDS = torch.arange(9)[None]
STOCK: dict[str, Any] = {
    "device": torch.device("cpu"),
    "compute_dtype": torch.float32,
    "attention": "eager",
}
WIDTH, STEP = 64, 32  # of the hidden size, roughly; widths are whole steps of kernels if possible
WIDTHS = r"hidden_size|d_model|n_embd|n_inner|ffn_dim|(\w+_)?(intermediate_size|ffn_hidden_size)"
HEADS = r"(\w+_)?(num|n)_(\w+_)?heads?"
SHARED = r"\w*(key_value|kv)_heads"  # there may be fewer than others
EXPERTS = r"(moe_)?num(_local|_routed)?_experts|n_routed_experts"
CHOSEN = r"(num_)?(experts_per_tok(en)?|selected_experts)|moe_(topk|k)|top_k_experts|n_group"
LAYERS = r"(num|n)_(\w+_)?layers?|(\w+_)?layers|(\w+_)?depth"
TOKENS = r"vocab_size\w*|\w+_token_id"
VOCABULARY = 512

logger = logging.getLogger("workflow")


def try_exports(source: Checkpoint, shape: ModelShape) -> None:
    """Raise `UserError` if a training on `source` could not be exported, evaluated or
    merged. A model that cannot be made narrow is logged."""
    step = ""
    with TemporaryDirectory() as name, quiet_transformers():
        try:
            config = plain_config(source, Path(name))
            shorten_(config, max(1, *map(shape.order.index, shape.order)) + 1)
            narrow_(config)
            write_random(config, Path(name) / "model", dtype=torch.float32)
            # The narrow sizes fit each other if stock Transformers runs its own file.
            load_base(Checkpoint(Path(name) / "model"), **STOCK)(input_ids=IDS, use_cache=False)
            for step in _steps(Path(name)):
                logger.debug("trial: %s", step)
        except Exception as error:
            if step:
                raise UserError(
                    f"{source.folder}: model_type = {config.model_type!r}: {step} fails "
                    f"({said_by(error)}). This was tried on a narrow random model of the class, "
                    "since after a training it would be too late. Choose another model.source."
                ) from None
            logger.info("exports are not tried before the training (%s)", said_by(error))


def _steps(folder: Path) -> Iterator[str]:
    """Go the way of the model in `folder`/model, and yield the name of each step before it."""
    model, base = Checkpoint(folder / "model"), Checkpoint(folder / "nf4")
    yield "its quantization"
    write_plain_base(model, base.folder, QuantizeConfig())
    yield "saving an adapter of it"
    adapter = write_narrow_adapter(model, folder / "adapter")
    yield "loading its base in stock Transformers"
    stock = load_base(base, **STOCK)
    yield "loading its adapter in stock PEFT"
    tuned = load_adapter(stock, Adapter(folder / "adapter"))
    yield "its evaluation"
    columns = torch.arange(1, IDS.numel(), 3)
    with torch.no_grad():
        logits = kept_logits(tuned, columns, input_ids=IDS, use_cache=False)
    assert logits.shape[:2] == (1, len(columns)), f"logits of shape {[*logits.shape]}"
    yield "merging it"
    with model.stored() as published:
        expected = {name: published.shape(name) for name in published.names()}
    tensors = merged_model(*adapter, original=model, base=base, onto="dequantized")
    merged = {name: tuple(tensor.shape) for name, tensor in tensors}
    wrong = sorted(name for name, _ in merged.items() ^ expected.items())
    assert not wrong, f"{wrong[0]} is not as in the published files"


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

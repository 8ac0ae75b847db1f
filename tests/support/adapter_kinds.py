"""Runs of tiny models with each kind of adapter: DoRA, LoRA by patterns, head and embedding trained
whole (`lora.modules_to_save`), rows of added tokens, which the config.json of a base names, and
bases in 16 bits.

Three processes have slices of 71, 71 and 69 rows of the vocabulary of 211."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.built_models import built_model
from tests.support.models import VOCAB, quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from tests.support.stock_training import save_run, trained
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.world import World
from workflow.lib.export.adapter_files import read_sharded_adapter, save_adapter
from workflow.lib.model.lora import TRAINED_ROWS
from workflow.lib.model.loss import vocabulary_slices
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.loop import Trainer
from workflow.lib.training.startup_checks import startup_checks

STEPS, BATCH, ROWS, SEQ_LEN, CLIP = 2, 12, 13, 23, 0.5
CPU = torch.device("cpu")
# Slices of three processes begin at 0, 71 and 142: two of them have some of these rows.
ADDED = range(138, 145)


@dataclass(frozen=True)
class Kind:
    """The base that is trained, one of `make_bases`, and settings of the adapter."""

    base: str
    lora: dict[str, Any] = field(default_factory=dict)


BOTH = ("model.embed_tokens", "lm_head")
KINDS = {
    "dora": Kind("biased", {"use_dora": True, "alpha": 6.0}),
    "patterns": Kind(
        "biased",
        {
            "target_modules": r"model\.layers\.[02]\..*(q_proj|v_proj|mlp\.\w+_proj)",
            "rank_pattern": {"q_proj": 7, r"layers\.2\.mlp\.\w+": 5},
            "alpha_pattern": {"down_proj": 21.0},
            "use_rslora": True,
        },
    ),
    "head": Kind("small", {"modules_to_save": ("lm_head",)}),
    "embedding": Kind("small", {"modules_to_save": ("embed_tokens",)}),
    "both": Kind("small", {"modules_to_save": BOTH}),
    "scaled and capped": Kind("capped", {"modules_to_save": BOTH}),
    "rows, tied": Kind("tied"),
    "rows, untied": Kind("untied"),
    "16 bits": Kind("plain"),
    "some in 16 bits, DoRA": Kind("kept", {"use_dora": True, "alpha": 6.0}),
}
# Settings of `quantize` of some bases.
BITS = {"plain": {"method": "none"}, "kept": {"keep": ("down_proj", r"layers\.1\.self_attn")}}
TRAIN = TrainConfig(
    epochs=None,
    max_steps=STEPS,
    global_batch_size=BATCH,
    learning_rate=1e-2,
    max_grad_norm=CLIP,
    weight_decay=0.1,
    adam_eps=1e-4,
)
# fp32 on both sides, sums in another order. AdamW divides gradients by their own magnitude, so
# adam_eps is far above their rounding errors.
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


def make_bases(folder: Path) -> Path:
    """Save each base in `NAME/original`, quantized in `NAME/nf4`; return `folder`."""
    small = {"num_hidden_layers": 1, "pad_token_id": 5}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    tiny_llama(folder / "biased" / "original", attention_bias=True, **sizes)
    tiny_llama(folder / "small" / "original", **small)
    for name in ("tied", "untied"):
        path = tiny_llama(folder / name / "original", tied=name == "tied", **small) / "config.json"
        write_json(path, read_json(path) | {TRAINED_ROWS: [ADDED.start, ADDED.stop]})
    scaled_and_capped(folder / "capped" / "original")
    for name in BITS:
        tiny_llama(folder / name / "original", num_hidden_layers=2, pad_token_id=5)
    for base in folder.iterdir():
        quantized(base / "original", base / "nf4", **BITS.get(base.name, {}))
    return folder


def scaled_and_capped(folder: Path) -> None:
    """Save a Gemma 3, which scales its embedding, with capped logits and a head of its own."""
    config = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        final_logit_softcapping=3.0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def base_of(folder: Path, kind: str) -> Path:
    return folder / KINDS[kind].base / "nf4"


def config(kind: str, **train: Any) -> RunConfig:
    lora = LoraSettings(**{"r": 4} | KINDS[kind].lora)
    return RunConfig(lora=lora, train=TRAIN.model_copy(update=train))


def build(
    folder: Path, kind: str, world: World, *, compute_dtype: torch.dtype = torch.float32
) -> Any:
    plan = make_plan(activation_checkpointing=2)
    return built_model(base_of(folder, kind), config(kind), plan, world, dtype=compute_dtype)


def take(
    model: Any,
    optimizer: Any,
    world: World,
    *,
    first: int = 0,
    num_steps: int = STEPS,
    count: int | None = None,
) -> list[Any]:
    """Make the steps of a run from step `first` on, at most `count`, of two micro-batches each."""
    found = Trainer.over(
        model.training,
        optimizer,
        random_store(rows=ROWS, seq_len=SEQ_LEN),
        TRAIN,
        micro_batch_size=BATCH // world.size // 2,
        world=world,
    ).steps(first_step=first, num_steps=num_steps)
    return list(islice(found, count))


def train_kinds(
    world, folder: Path, target: Path, enough_slices: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """Train each kind; leave the sharded adapter and the record of its logits in `target`."""
    vocabulary_slices.ENOUGH_SLICES = enough_slices
    return {kind: train_one(folder, kind, target / kind, world) for kind in kinds}


def train_one(folder: Path, kind: str, target: Path, world: World) -> dict[str, Any]:
    model, store = build(folder, kind, world), random_store(rows=ROWS, seq_len=SEQ_LEN)
    checks = startup_checks(model, store, Checkpoint(base_of(folder, kind)), world)
    size = BATCH // world.size // 2
    found = trained(model, TRAIN, store, world, micro_batch_size=size)
    save_run(model, target, store, world)
    return {
        "checks": [check.passed for check in checks],
        "counted": model.num_parameters(),
        **found,
    }


def export(run: Path) -> Path:
    adapter = read_sharded_adapter(run / "adapter")
    save_adapter(adapter, read_json(run / "adapter_config.json"), run / "exported")
    return run / "exported"

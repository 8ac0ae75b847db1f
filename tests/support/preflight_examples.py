"""Model shapes and tiny checkpoints for the tests of preflight; nothing here needs torch."""

import json
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear, ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.step_plan.plan import StepPlan

GPU_24 = 24 * 2**30
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATHS = tuple(f"{'self_attn' if place < 4 else 'mlp'}.{name}" for place, name in enumerate(SEVEN))


def llama_config(*sizes: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a Llama; sizes: hidden, of the feed-forward, layers, heads, heads of keys,
    vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = dict(zip((*names, "num_key_value_heads", "vocab_size"), sizes, strict=True))
    others = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
    return {"model_type": "llama"} | named | others | changes


# Sizes that no power of two divides; 3 layers; grouped-query heads.
TINY = llama_config(30, 46, 3, 3, 1, 101, max_position_embeddings=128)


def llama_shape(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool = False,
) -> ModelShape:
    """The shape of a Llama of any size."""
    width = hidden // heads * kv_heads
    outputs = (hidden, width, width, hidden, feed_forward, feed_forward, hidden)
    inputs = (hidden,) * 6 + (feed_forward,)
    layer = DecoderLayer(
        attention="full",
        attention_softcap=False,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        linears=tuple(map(Linear, PATHS, outputs, inputs)),
        vectors=(("input_layernorm.weight", hidden), ("post_attention_layernorm.weight", hidden)),
    )
    return ModelShape(
        family="llama",
        kinds=(layer,),
        order=(0,) * layers,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=131072,
        embedding="model.embed_tokens",
        head="lm_head",
        layers="model.layers",
        tied_embeddings=tied,
        logit_softcap=False,
        attention_masks=1,
        other_vectors=(("model.norm.weight", hidden),),
        source_dtype="BF16",
    )


def llama_70b(*, layers: int = 80, vocab: int = 32000) -> ModelShape:
    """Llama-2-70B, or as many of its layers."""
    return llama_shape(
        layers=layers, hidden=8192, feed_forward=28672, heads=64, kv_heads=8, vocab=vocab
    )


def llama_405b() -> ModelShape:
    """Llama-3.1-405B."""
    return llama_shape(
        layers=126, hidden=16384, feed_forward=53248, heads=128, kv_heads=8, vocab=128256
    )


def setup(**changes: Any) -> StepPlan:
    """Two processes, one row of 2,048 tokens, rank 16 on all linears, bf16, recomputation, flash
    attention."""
    settings = {
        "processes": 2,
        "micro_batch_size": 1,
        "seq_len": 2048,
        "rank": 16,
        "targets": SEVEN,
    }
    return StepPlan(**(settings | changes))


def machine(**changes: Any) -> Machine:
    """Two RTX 4090."""
    settings = {
        "device": "cuda",
        "processes": 2,
        "gpu_names": ("NVIDIA GeForce RTX 4090",) * 2,
        "gpu_bytes": GPU_24,
        "host_bytes": 64 * 2**30,
        "flash_attention": True,
    }
    return Machine(**(settings | changes))


def cpu_machine(**changes: Any) -> Machine:
    """Three CPU processes on 16 GiB."""
    settings = {"device": "cpu", "processes": 3, "gpu_names": (), "gpu_bytes": None}
    return machine(**(settings | {"host_bytes": 16 * 2**30, "flash_attention": False} | changes))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama checkpoint with this config.json."""
    h, f = config["hidden_size"], config["intermediate_size"]
    k = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (k, h),
        "self_attn.v_proj": (k, h),
        "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{n}.weight": shape for n, shape in layer.items()}
    return shapes


def write_checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    dtype: Any = np.float16,
) -> Path:
    """Write config.json and model.safetensors (ones) to `folder`; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = TINY if config is None else config
    tensors = tensor_shapes(TINY) if shapes is None else shapes
    (folder / "config.json").write_text(json.dumps(settings))
    ones = {name: np.ones(shape, dtype=dtype) for name, shape in tensors.items()}
    save_file(ones, folder / "model.safetensors")
    return folder


def token_counts(**changes: Any) -> TokenCounts:
    counts = {"seq_len": 61, "vocab_size": 101, "heldout_tokens": 307}
    return TokenCounts(**(counts | {"packed_rows": 37, "trained_tokens": 1103} | changes))


def manifest(**changes: Any) -> dict[str, Any]:
    """The part of a tokens manifest that preflight reads: 37 rows of 61 tokens."""
    train = {"packed_rows": 37, "tokens": 2200, "trained_tokens": 1103}
    return {
        "format_version": 1,
        "seq_len": 61,
        "vocab_size": 101,
        "splits": {"train": train, "heldout": {"tokens": 307, "documents": 5}},
    } | changes


def num_calls(do: Callable[[], object]) -> int:
    """Return how many functions of Python a call runs: its work, however busy the machine is."""
    profile = Profile(builtins=False)
    profile.runcall(do)
    return sum(entry.callcount for entry in profile.getstats())

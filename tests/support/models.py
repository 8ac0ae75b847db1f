"""Tiny random models and tokens for tests: odd sizes on purpose, weights not near zero."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.checkpoint import Checkpoint, check_loading
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.sharded_files import piece_of, write_sharded
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.layers.frozen_linear import FrozenLinear
from workflow.lib.model.layers.weight_storage import PlainSpec, read_specs
from workflow.lib.model.lora import init_adapters_, inject_adapters
from workflow.lib.model.nf4_model import build_base_on_meta, load_weights_, materialize_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.quantization.nf4_checkpoint import quantize_tensor, write_plain_base
from workflow.lib.settings.config import LoraSettings, QuantizeConfig

VOCAB = 211


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a random Llama: 3 layers, 5 query heads, odd vocabulary."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 80,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def tiny_llama(
    folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Save a `random_llama` to `folder`; return `folder`."""
    random_llama(tie_word_embeddings=tied, **changes).to(dtype).save_pretrained(folder)
    return folder


def tiny_gemma2(folder: Path, **changes: Any) -> Path:
    """Save a random Gemma 2 of 3 layers, windows shorter than rows, to `folder`; return
    `folder`."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 32,
        "sliding_window": 7,
        "pad_token_id": 0,
    }
    model = Gemma2ForCausalLM(Gemma2Config(**(settings | changes)))
    model.save_pretrained(folder)
    return folder


def quantized(source: Path, target: Path, **settings: Any) -> Path:
    """Quantize a model folder to NF4 by the stage's own functions; return `target`."""
    checkpoint = Checkpoint(source)
    with checkpoint.weights() as reader:
        check_loading(reader)
    write_plain_base(checkpoint, target, QuantizeConfig(**settings), shard_bytes=2**16)
    return target


def stock_base(
    folder: Path, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """Load a model folder on the CPU by stock Transformers, as the evaluation does."""
    device = torch.device("cpu")
    return load_base(Checkpoint(folder), device=device, compute_dtype=dtype, attention=attention)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a model folder's files."""
    with CheckpointReader(folder) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def base_fixture(
    make: Callable[..., Path] = tiny_llama, *, keep: tuple[str, ...] = (), **changes: Any
) -> Any:
    """Return a fixture of a test module: the base of what `make` saves. Never change it."""

    @pytest.fixture(scope="module")
    def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("base")
        return quantized(make(folder / "original", **changes), folder / "nf4", keep=keep)

    return base


def adapted(
    base: Path,
    *,
    attention: str = "sdpa",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    fused_layers: bool = False,
    **lora: Any,
) -> CausalLMForTraining:
    """Build the training module of an NF4 folder on one process, without sharding, as `setup`
    does."""
    model = build_base_on_meta(Checkpoint(base), compute_dtype=dtype, attention=attention)
    peft_model = inject_adapters(model, LoraSettings(**lora))
    if fused_layers:
        fuse_layers_(model)
    training = CausalLMForTraining(peft_model)
    materialize_(training, transformers_model=model, device=torch.device(device))
    load_weights_(model, Checkpoint(base).stored())
    init_adapters_(training, seed=0, base=Checkpoint(base).stored())
    return training


def random_store(*, rows: int, seq_len: int, seed: int = 0) -> TokenStore:
    """Return packed random rows: 1 to 4 documents a row, a padding tail in some, half of the tokens
    trained; 3 held-out documents."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, VOCAB, size=(rows, seq_len), dtype=np.uint32)
    positions = np.empty((rows, seq_len), dtype=np.int32)
    for row in positions:
        cuts = np.sort(draw.choice(np.arange(1, seq_len), size=draw.integers(0, 4), replace=False))
        for start, stop in zip([0, *cuts], [*cuts, seq_len], strict=True):
            row[start:stop] = np.arange(stop - start)
    mask = (draw.random((rows, seq_len)) < 0.5) & (positions > 0)
    mask[:, -3:] &= draw.random((rows, 1)) < 0.5
    offsets = np.array([0, 7, 29, 60])
    heldout_mask = np.ones(60, dtype=bool)
    heldout_mask[offsets[:-1]] = False
    heldout = (draw.integers(0, VOCAB, size=60, dtype=np.uint32), heldout_mask, offsets)
    arrays = token_arrays(ids, mask, positions, heldout=heldout)
    manifest = {"seq_len": seq_len, "vocab_size": VOCAB} | heldout_from(questions=3)
    return TokenStore(manifest=manifest, arrays=arrays)


def heldout_from(**documents: int) -> dict[str, Any]:
    """Return what a manifest says of held-out documents: how many each source has."""
    sources = [{"source": name, "documents": number} for name, number in documents.items()]
    return {"splits": {"heldout": {"sources": sources}}}


def nf4_linear(
    folder: Path, weight: torch.Tensor, *, bias: torch.Tensor | None = None, **settings: Any
) -> FrozenLinear:
    """Quantize `weight` (out, in), write it as a checkpoint to `folder`, and load it from there as
    the engine does."""
    parts = quantize_tensor(weight, QuantizeConfig(**settings), device=torch.device("cpu"))
    stored = {f"linear.{suffix}": part for suffix, part in parts.items()}
    if bias is not None:
        stored["linear.bias"] = bias
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        (spec,) = read_specs(reader).values()
    linear = FrozenLinear(spec, bias=bias is not None, compute_dtype=torch.float32)
    model = torch.nn.ModuleDict({"linear": linear}).to_empty(device="cpu")
    load_weights_(model, Checkpoint(folder).stored())
    return linear


def plain_linear(
    folder: Path, weight: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> FrozenLinear:
    """Write `weight` (out, in) as a checkpoint to `folder`, and load it in `dtype`."""
    folder.mkdir(parents=True)
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    linear = FrozenLinear(PlainSpec(tuple(weight.shape), dtype), bias=False, compute_dtype=dtype)
    model = torch.nn.ModuleDict({"linear": linear}).to_empty(device="cpu")
    with CheckpointReader(folder) as reader:
        load_weights_(model, reader)
    return linear


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a folder of shards as one process does, without torchrun; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        pieces = {name: piece_of(tensor, rank=0) for name, tensor in tensors.items()}
        write_sharded(folder, pieces, group=torch.distributed.group.WORLD, facts={})
    finally:
        torch.distributed.destroy_process_group()
    return folder


def decoded_by_hand(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return the NF4 weights that bitsandbytes' quantization made, in fp32: code times scale, block
    after block (QLoRA, eq. 4 and 5)."""
    nibbles = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten()
    count, scales = math.prod(state.shape), state.absmax
    if state.nested:
        nested = state.state2.code[scales.long()]
        blocks = torch.arange(len(scales)) // state.state2.blocksize
        scales = nested * state.state2.absmax[blocks] + state.offset
    codes = state.code[nibbles[:count].long()]
    return (codes * scales[torch.arange(count) // state.blocksize]).view(state.shape)

"""Feed-forwards and experts in tiles of tokens against the whole row: loss and all gradients, by
what whole rows in fp32 lose to whole rows in fp64."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, quantized, random_store, tiny_llama
from tests.support.rounding import allowed, assert_rounded, lost
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.kernels.rows.dropout import Draw, Part, dropped
from workflow.lib.model.experts.fused_experts import FusedExperts
from workflow.lib.model.fused_feed_forward import FusedFeedForward
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.recomputation import checkpoint_activations_
from workflow.lib.training.batches import stored_batch

ROWS, SEQ_LEN, TILE = 2, 31, 7  # tiles begin within rows, and the last one has 6 tokens
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEYS = torch.tensor([5, 2**40])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Linears in 16 bits, which fp64 can read."""
    folder = tmp_path_factory.mktemp("base")
    original = tiny_llama(
        folder / "original", hidden_size=64, intermediate_size=192, num_attention_heads=4
    )
    return quantized(original, folder / "plain", method="none")


@pytest.fixture(scope="module")
def batch():
    """Packed rows with padding."""
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    return replace(stored_batch(store, np.arange(ROWS)), row_keys=KEYS)


def built(folder, *, recomputed, dtype=torch.float32, float8=False, **lora):
    options = {"attention": "eager", "fused_layers": True, "r": 4} | lora
    training = adapted(folder, dtype=dtype, **options)
    draw = torch.Generator().manual_seed(0)
    for parameter in trainable_parameters(training).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    if recomputed:
        model = training.peft_model.get_base_model()
        checkpoint_activations_(model, range(len(decoder_layers(model))))
    if float8:
        training.multiply_in_("float8", "both")
    return training.train()


def results(training, batch):
    """The loss and all gradients, by name."""
    training.zero_grad()
    with training.adapters.unchanged(), training.matmul_precision.in_eight_bits():
        loss = training(batch)
        loss.backward()
    params = trainable_parameters(training)
    grads = {name: parameter.grad.clone() for name, parameter in params.items()}
    return {"loss": loss.detach()} | {k: grad for k, grad in grads.items() if grad.any()}


def assert_tiles_round(build, batch):
    """Raise `AssertionError` if tiles lose more than rounding does; build: makes the model."""
    whole = build()
    before = results(whole, batch)
    assert whole.tile_(TILE)
    tiled = results(whole, batch)
    exact = results(build(dtype=torch.float64), batch)
    losses = [lost(before[name], tensor) for name, tensor in exact.items()]
    assert_rounded(tiled, exact, share=allowed(losses))


KINDS = {"plain": {}, "dropout": {"dropout": 0.3}, "attention alone": {"target_modules": SEVEN[:4]}}


@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_tiled_feed_forwards_differ_by_rounding(base, batch, kind, recomputed):
    options = {"target_modules": SEVEN} | KINDS[kind]
    assert_tiles_round(partial(built, base, recomputed=recomputed, **options), batch)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
def test_tiled_feed_forwards_with_dora_differ_by_rounding(base, batch, dropout, recomputed):
    options = {"target_modules": SEVEN, "use_dora": True, "dropout": dropout}
    assert_tiles_round(partial(built, base, recomputed=recomputed, **options), batch)


@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_tiled_experts_differ_by_rounding(tmp_path, batch, family, recomputed):
    """Of glm4_moe also the experts that all tokens share, and a layer without experts."""
    original = tiny_mixture(family, tmp_path / "original")
    folder = quantized(original, tmp_path / "plain", method="none")
    targets = {"target_modules": "all-linear"}
    assert_tiles_round(partial(built, folder, recomputed=recomputed, **targets), batch)


def test_tiles_multiply_in_float8_by_tokens(base, batch):
    """Each token has its own scale, so a tile rounds nothing anew. Sums in another order move some
    values to the next float8: of each tensor less than float8 loses there to fp64."""
    make = partial(built, base, recomputed=True, target_modules=SEVEN)
    training = make(float8=True)
    whole, exact = results(training, batch), results(make(dtype=torch.float64), batch)
    training.tile_(TILE)
    for name, tensor in results(training, batch).items():
        assert lost(tensor, whole[name]) < lost(whole[name], exact[name]), name


def test_norm_of_a_tile_has_the_bits_of_the_row(base):
    training = built(base, recomputed=False)
    norm = decoder_layers(training.peft_model.get_base_model())[0].input_layernorm
    x = torch.randn(SEQ_LEN, 64)
    tiles = torch.cat([norm(part) for part in x.split(TILE)])
    assert torch.equal(tiles, norm(x))


def test_masks_of_tiles_are_those_of_the_rows():
    x = torch.ones(ROWS * SEQ_LEN, 19)
    whole = dropped(x, Draw(KEYS, 3, 20_000))
    starts = range(0, len(x), TILE)
    parts = [
        dropped(part, Draw(KEYS, 3, 20_000, Part(start, len(x))))
        for start, part in zip(starts, x.split(TILE), strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)


class Widths(torch.utils._python_dispatch.TorchDispatchMode):
    """The most tokens of a tensor as wide as the intermediate."""

    def __init__(self, width):
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.width,):
                self.most = max(self.most, tensor.shape[:-1].numel())
        return made


@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
def test_intermediate_is_never_longer_than_a_tile(base, batch, recomputed):
    training = built(base, recomputed=recomputed, target_modules=SEVEN[:4])
    most = []
    for tokens in (10**6, 64):  # 64: rows of weights are as wide
        training.tile_(tokens)
        with Widths(192) as seen:
            results(training, batch)
        most.append(seen.most)
    assert most[0] >= ROWS * SEQ_LEN
    training.tile_(TILE)
    with Widths(192) as seen:
        results(training, batch)
    assert seen.most == 64  # hidden rows of `down`, decoded


def test_recomputation_computes_no_tile(base, batch):
    """Forward computes each tile with its output, backward once without; recomputation neither."""
    training = built(base, recomputed=True)
    feed_forwards = [x for x in training.modules() if isinstance(x, FusedFeedForward)]
    calls = {True: 0, False: 0}
    for module in feed_forwards:
        compute = module.compute

        def counted(*inputs, valued=True, compute=compute):
            calls[valued] += 1
            return compute(*inputs, valued=valued)

        module.compute = counted
    training.tile_(TILE)
    results(training, batch)
    tiles = -(-ROWS * SEQ_LEN // TILE) * len(feed_forwards)
    assert calls == {True: tiles, False: tiles}


def test_model_without_such_modules_has_no_tiles(base):
    assert adapted(base).tile_(TILE) == 0
    assert not any(isinstance(x, FusedExperts) for x in adapted(base).modules())

"""Masks that nobody keeps: their generator, their statistics, and on what they depend."""

import math

import pytest
import torch

from workflow.lib.kernels.rows.dropout import Draw, drop, drop_, dropped, philox
from workflow.lib.model.layers.adapter_dropout import AdapterDropout, AdapterState, row_keys

ROWS, SEQ_LEN, FEATURES = [4, 90, 17], 7, 1000


def keys(*rows, step=5):
    return torch.tensor(row_keys(3, step=step, rows=rows))


def mask(draw, features=FEATURES):
    """Return what is kept (rows * SEQ_LEN, features), 1 or 0."""
    return dropped(torch.ones(len(draw.row_keys) * SEQ_LEN, features), draw)


@pytest.mark.parametrize(
    ("rounds", "word", "expected"),
    [
        (7, 0x00000000, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, 0x00000000, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, 0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_generator_gives_the_known_answers_of_its_authors(rounds, word, expected):
    """Random123, kat_vectors: key and counter of equal words."""
    key = torch.tensor(-1 if word else 0)
    words = philox(key, (torch.tensor(word),) * 4, rounds=rounds)
    assert " ".join(f"{int(x):08x}" for x in words) == expected


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_share_that_is_dropped_is_the_probability(p):
    """In the whole, in every row and eighth of the features: within 5 standard errors."""
    threshold = round(p * 65536)
    drops = 1 - mask(Draw(keys(*range(64)), 3, threshold))
    eighths = torch.stack(drops.chunk(8, dim=1)).mean(dim=(1, 2))
    rows = drops.view(64, -1).mean(dim=1)
    for shares, count in ((eighths, 64 * SEQ_LEN * 125), (rows, SEQ_LEN * FEATURES)):
        error = math.sqrt(p * (1 - p) / count)
        assert float((shares - threshold / 65536).abs().max()) < 5 * error


@pytest.mark.parametrize("other", ["linear", "step", "row", "position", "feature"])
def test_masks_of_anything_else_are_independent(other):
    """Correlation of two masks of 49,000 draws: within 5 standard errors of 0."""
    numbers = tuple(range(7))
    one = mask(Draw(keys(*numbers), 0, 32_768))
    two = {
        "linear": lambda: mask(Draw(keys(*numbers), 1, 32_768)),
        "step": lambda: mask(Draw(keys(*numbers, step=6), 0, 32_768)),
        "row": lambda: one.view(7, -1).roll(1, 0).view_as(one),
        "position": lambda: one.view(7, SEQ_LEN, -1).roll(1, 1).view_as(one),
        "feature": lambda: one.roll(1, 1),
    }[other]()
    product = (2 * one - 1) * (2 * two - 1)
    assert abs(float(product.mean())) < 5 / math.sqrt(one.numel())


def test_mask_of_a_row_does_not_depend_on_what_it_is_computed_with():
    together = mask(Draw(keys(*ROWS), 2, 9_000))
    alone = [mask(Draw(keys(row), 2, 9_000)) for row in ROWS]
    assert torch.equal(together, torch.cat(alone))


def test_sum_and_in_place_drop_the_same():
    draw = Draw(keys(*ROWS), 2, 9_000)
    rows = torch.randn(3 * SEQ_LEN, 13, generator=torch.Generator().manual_seed(0))
    expected, total = dropped(rows, draw), torch.full_like(rows, 2.0)
    drop(total, rows.clone(), draw, True)
    assert torch.equal(total, expected + 2.0)
    assert torch.equal(drop_(rows, draw), expected)


def test_module_scales_what_it_keeps_and_its_gradient_alike():
    module, state = AdapterDropout(0.25), AdapterState()
    module.share(state, linear=9)
    state.row_keys = keys(*ROWS)
    x = torch.randn(3, SEQ_LEN, 13, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = module(x)
    kept = mask(Draw(keys(*ROWS), 9, 16_384), 13).view_as(x)
    torch.testing.assert_close(y, x * kept / 0.75)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, kept / 0.75)
    assert torch.equal(module.eval()(x), x)


def test_training_without_keys_is_an_error():
    with pytest.raises(AssertionError, match="without keys of its rows"):
        AdapterDropout(0.25)(torch.ones(2, 3))


def test_probability_next_to_one_keeps_something():
    module, state = AdapterDropout(1 - 1e-9), AdapterState()
    module.share(state, linear=0)
    state.row_keys = keys(1)
    draw = module.draw()
    assert draw is not None
    assert draw.scale == 65536

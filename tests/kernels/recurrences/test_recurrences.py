"""The recurrences by chunks against their definitions, token by token, in float64."""

from functools import partial

import pytest
import torch
from torch import nn

from workflow.lib.kernels.recurrences import gated_delta_rule as delta_rule
from workflow.lib.kernels.recurrences import state_space as space
from workflow.lib.kernels.recurrences.gated_delta_rule import gated_delta_rule
from workflow.lib.kernels.recurrences.short_convolution import short_convolution
from workflow.lib.kernels.recurrences.state_space import Steps, state_space

NO_LIMITS = (0.0, float("inf"))
ROWS = 2


def drawn(*shapes):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def deltas(tokens, *, groups=2, heads=6):
    query, key, value, decay, rate = drawn(
        (ROWS, tokens, groups, 8),
        (ROWS, tokens, groups, 8),
        (ROWS, tokens, heads, 12),
        *[(ROWS, tokens, heads)] * 2,
    )
    return [query, key / 3, value, -0.3 * decay.abs(), rate.sigmoid()]


def normalized_rule(*tensors):
    return gated_delta_rule(*tensors, True)


def delta_by_token(q, k, v, log_decay, rate, *, normalize):
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state = torch.zeros(ROWS, v.shape[2], k.shape[-1], v.shape[-1], dtype=q.dtype)
    outputs = []
    for i in range(q.shape[1]):
        key, value, b = k[:, i], v[:, i], rate[:, i, :, None]
        state = state * log_decay[:, i].exp()[..., None, None]
        known = torch.einsum("bhk,bhkv->bhv", key, state)
        state = state + torch.einsum("bhk,bhv->bhkv", key, b * (value - known))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, i], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1)


def spaces(tokens, *, of_heads=True):
    x, dt, into, out_of, decay, skip, bias = drawn(
        (ROWS, tokens, 6, 8), (ROWS, tokens, 6), *[(ROWS, tokens, 2, 5)] * 2, *[(6,)] * 3
    )
    return [x, dt, -decay.abs(), into, out_of, *([skip, bias] if of_heads else [None, None])]


def by_chunks(x, dt, decay, into, out_of, skip, bias, **options):
    return state_space(x, dt, into, out_of, decay, skip, bias, Steps(**options))


def space_by_token(x, dt, decay, into, out_of, skip, bias, **options):
    into, out_of = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (into, out_of))
    steps = dt if bias is None else dt + bias
    steps = nn.functional.softplus(steps) if options["softplus"] else steps
    steps = steps.clamp(*options["limits"])
    state = torch.zeros(ROWS, x.shape[2], x.shape[3], into.shape[-1], dtype=x.dtype)
    outputs = []
    for i in range(x.shape[1]):
        state = state * (steps[:, i] * decay).exp()[..., None, None]
        given = steps[:, i, :, None] * x[:, i]
        state = state + torch.einsum("bhp,bhn->bhpn", given, into[:, i])
        output = torch.einsum("bhpn,bhn->bhp", state, out_of[:, i])
        outputs.append(output if skip is None else output + skip[:, None] * x[:, i])
    return torch.stack(outputs, dim=1)


def with_gradients(function, tensors, dtype):
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    output = function(*leaves)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = [x for x in leaves if x is not None]
    return [output.detach(), *torch.autograd.grad(output, given, slope)]


def close(ours, by_token, tensors):
    """Whether values and gradients differ by little of their largest, against float64."""
    found = with_gradients(ours, tensors, torch.float32)
    expected = with_gradients(by_token, tensors, torch.float64)
    differences = [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    ]
    return max(differences) < 3e-5


@pytest.mark.parametrize("tokens", [1, delta_rule.CHUNK, 2 * delta_rule.CHUNK + 37])
@pytest.mark.parametrize("normalize", [True, False])
def test_delta_rule_is_that_of_its_definition(tokens, normalize):
    by_token = partial(delta_by_token, normalize=normalize)
    assert close(lambda *x: gated_delta_rule(*x, normalize), by_token, deltas(tokens))


def test_delta_rule_of_as_many_keys_as_values():
    by_token = partial(delta_by_token, normalize=True)
    assert close(normalized_rule, by_token, deltas(70, groups=3, heads=3))


@pytest.mark.parametrize("tokens", [1, space.CHUNK, 2 * space.CHUNK + 37])
@pytest.mark.parametrize(
    ("of_heads", "softplus", "limits"),
    [(True, True, NO_LIMITS), (False, False, (0.01, 0.9))],
    ids=["with bias and skip", "clamped"],
)
def test_state_space_is_that_of_its_definition(tokens, of_heads, softplus, limits):
    options = {"softplus": softplus, "limits": limits}
    ours, by_token = (partial(f, **options) for f in (by_chunks, space_by_token))
    assert close(ours, by_token, spaces(tokens, of_heads=of_heads))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_convolution_is_torchs(biased, silu):
    x, weight, bias = drawn((ROWS, 10, 30), (10, 4), (10,))
    shift = bias if biased else None

    def torchs(x):
        of_bias = None if shift is None else shift.to(x.dtype)
        y = nn.functional.conv1d(x, weight[:, None].to(x.dtype), of_bias, padding=3, groups=10)[
            ..., :30
        ]
        return nn.functional.silu(y) if silu else y

    def ours(x):
        return short_convolution(x, weight, shift, silu=silu)

    assert close(ours, torchs, [x])


def test_types_of_the_model_come_out_and_differ_by_rounding():
    values = [x.bfloat16() for x in deltas(100)]
    output = normalized_rule(*values)
    exact = delta_by_token(*(x.double() for x in values), normalize=True)
    assert output.dtype == torch.bfloat16
    assert (output - exact).abs().max() < 0.01 * exact.abs().max()


def saved_by(work):
    saved = []

    def packed(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
        work()
    return saved


def test_nothing_but_the_inputs_is_kept():
    """Whatever the number of chunks."""
    leaves = [x.requires_grad_() for x in deltas(300)]
    saved = saved_by(lambda: normalized_rule(*leaves))
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in leaves]
    x, weight = drawn((ROWS, 10, 30), (10, 4))
    kept = saved_by(lambda: short_convolution(x.requires_grad_(), weight, None, silu=True))
    assert {y.data_ptr() for y in kept} == {x.data_ptr(), weight.data_ptr()}


def test_gradients_are_made_for_those_that_need_them_alone():
    query, key, value, decay, rate = deltas(70)
    output = normalized_rule(query, key, value.requires_grad_(), decay, rate)
    output.sum().backward()
    assert value.grad is not None
    assert query.grad is None


def test_strong_decay_overflows_nothing():
    """exp of what is before a token would, far from it."""
    values = deltas(200)
    values[3] = values[3] * 200
    found = with_gradients(normalized_rule, values, torch.float32)
    assert all(x.isfinite().all() for x in found)
    given = spaces(300)
    given[2] = given[2] * 1000
    options = {"softplus": True, "limits": NO_LIMITS}
    found = with_gradients(partial(by_chunks, **options), given, torch.float32)
    assert all(x.isfinite().all() for x in found)

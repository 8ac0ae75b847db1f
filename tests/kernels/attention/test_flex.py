"""Attention of documents in packed rows that is soft-capped, has sinks or chunks: equal to each
document alone, to the families' own, and to torch's kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from tests.support.refusals import refusal
from workflow.lib.kernels.attention.flex import blockwise, flex_arguments, flex_attention
from workflow.lib.kernels.attention.flex_masks import MaskKind, PackedMasks
from workflow.lib.system.errors import UserError

LENGTHS = [[13, 1, 9], [23]]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def layer(**config):
    """Return what an attention layer of a family shows of itself."""
    module = torch.nn.Module()
    module.config = SimpleNamespace(**config)
    module.layer_idx = 0
    return module


def heads(value_width=8):
    draw = torch.Generator().manual_seed(0)
    rows, length = POSITIONS.shape
    return [
        torch.randn(rows, number, length, size, generator=draw).requires_grad_()
        for number, size in [(4, 8), (2, 8), (2, value_width)]
    ]


def one_by_one(query, key, value, **arguments):
    rows = []
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        parts = [
            flex_attention(
                layer(),
                *(x[row : row + 1, :, end - length : end] for x in (query, key, value)),
                None,
                **flex_arguments(torch.arange(length)[None]),
                **arguments,
            )[0]
            for length, end in zip(lengths, ends, strict=True)
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sliding_window": 4, "scaling": 0.7},
        {"softcap": 2.0},
        {"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"softcap": 2.0, "sliding_window": 1, "s_aux": torch.zeros(4)},
    ],
)
def test_document_has_the_same_attention_packed_and_alone(arguments):
    given = heads(value_width=6)
    packed, _ = flex_attention(layer(), *given, None, **flex_arguments(POSITIONS), **arguments)
    alone = one_by_one(*given, **arguments)
    torch.testing.assert_close(packed, alone)
    draw = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(output, given, draw) for output in (packed, alone)]
    torch.testing.assert_close(*grads)


def test_plain_attention_is_torchs():
    query, key, value = heads()
    output = one_by_one(query, key, value)
    theirs = scaled_dot_product_attention(
        query[1:], key[1:], value[1:], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(output[1:], theirs.transpose(1, 2))


def test_sink_is_a_score_without_a_value():
    """By hand: one key of score 0 beside a sink of log 3 keeps a quarter of its value."""
    query, key, value = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    sink = torch.tensor([3.0]).log()
    documents = flex_arguments(torch.zeros(1, 1, dtype=torch.long))
    output, _ = flex_attention(layer(), query, key, value, None, s_aux=sink, **documents)
    torch.testing.assert_close(output, torch.full((1, 1, 1, 2), 0.25))


def test_chunk_starts_with_the_document():
    config = {"layer_types": ["chunked_attention"], "attention_chunk_size": 5}
    query, key, value = heads()
    chunked, _ = flex_attention(
        layer(**config), query, key, value, None, **flex_arguments(POSITIONS)
    )
    cut, _ = flex_attention(layer(), query, key, value, None, **flex_arguments(POSITIONS % 5))
    torch.testing.assert_close(chunked, cut)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.zeros(5, 5)}, "attention_mask"),
    ],
)
def test_what_flex_would_leave_out_is_refused(arguments, named):
    told = {"attention_mask": None} | flex_arguments(POSITIONS) | arguments
    assert refusal(flex_attention, layer(), *heads(), **told) == (
        f"model.attention = 'flex': Module asks its attention for {named}, which flex cannot do, "
        "and the model would be trained without. Set it to eager."
    )


def test_layer_that_does_not_hand_documents_on_is_refused():
    with pytest.raises(UserError, match=r"model\.attention = 'flex': the layers of Module do not"):
        flex_attention(layer(), *heads(), None)


@pytest.mark.parametrize(
    "case", [{"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}, {"value_width": 6}]
)
def test_torchs_kernel_follows_the_blocks_and_is_compiled_once_for_all_packings(case, monkeypatch):
    """Without gradients: on a CPU it has none."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    torch.compiler.reset()
    arguments = {"scale": 0.3, "softcap": None, "sinks": None} | case
    query, key, value = (x.detach() for x in heads(value_width=arguments.pop("value_width", 8)))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(blockwise, fullgraph=True, backend=counter)
    told = {"softcap": arguments["softcap"], "s_aux": arguments["sinks"], "scaling": 0.3}
    for kind in (MaskKind(), MaskKind(window=4), MaskKind(window=9)):
        for position_ids in (POSITIONS, POSITIONS % 11, POSITIONS % 23):
            mask = PackedMasks(position_ids).block_mask(kind)
            output = compiled(query, key, value, mask, **arguments)
            expected, _ = flex_attention(
                layer(),
                query,
                key,
                value,
                None,
                **flex_arguments(position_ids),
                sliding_window=kind.window,
                **told,
            )
            torch.testing.assert_close(output, expected)
    assert counter.frame_count == 1


def test_kernel_that_is_not_compiled_is_an_error():
    with pytest.raises(AssertionError, match="all scores would be made"):
        blockwise(
            *heads(), PackedMasks(POSITIONS).block_mask(MaskKind()),
            scale=1.0, softcap=None, sinks=None,
        )  # fmt: skip

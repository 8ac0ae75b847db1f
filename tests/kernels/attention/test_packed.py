"""Which attention a run gets, and what is refused. That no document sees another:
`tests/training/test_families.py`."""

import numpy as np
import pytest
import torch

from tests.support.refusals import refusal
from workflow.lib.kernels.attention import document_attention
from workflow.lib.kernels.attention import packed as packed_attention
from workflow.lib.kernels.attention.attention_choice import AttentionNeeds, automatic_attention
from workflow.lib.kernels.attention.document_attention import Seen, takes_documents
from workflow.lib.kernels.attention.head_groups import GROUPS, Kernels, by_head_groups
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.packed import (
    cudnn_kernels,
    document_bounds,
    flash_arguments,
    varlen_attention,
    varlen_kernels,
)
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.backends import resolve_training_attention
from workflow.lib.system.errors import UserError

NOTHING, SOFTCAP = AttentionNeeds(), AttentionNeeds(softcap=True)
EAGER_ALONE = AttentionNeeds(eager_alone=True, no_sdpa=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolved(name, device=GPU, *, dtype=torch.bfloat16, needs=NOTHING):
    return resolve_training_attention(name, device, needs, compute_dtype=dtype).name


def test_auto_on_a_gpu_without_the_package_is_the_flash_attention_of_torch():
    assert resolved("auto") in ("varlen", "flash_attention_2")


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        (SOFTCAP, "eager"),
        (AttentionNeeds(sinks=True), "flex"),
        (AttentionNeeds(masks_of_rows=True), "flex"),
        (AttentionNeeds(no_sdpa=True), "eager"),
        (EAGER_ALONE, "eager"),
    ],
)
def test_auto_is_not_sdpa_for_what_it_would_leave_out(needs, name):
    assert resolved("auto", CPU, dtype=torch.float32, needs=needs) == name
    assert resolved("auto", dtype=torch.float32, needs=needs) == name


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (SOFTCAP, "it cannot soft-cap attention scores, as this model does"),
        (AttentionNeeds(sinks=True), "it has no attention sinks, as this model has"),
        (AttentionNeeds(chunks=True), "it has no chunks, as this model's attention has"),
        (
            AttentionNeeds(head_dim=192),
            "it wants values as wide as keys, and this model's are 128 and 192",
        ),
    ],
)
def test_auto_on_a_gpu_is_flex_for_what_varlen_cannot_do(needs, reason):
    on = {"cuda": True, "bfloat16": True, "compute_dtype": "bfloat16"}
    choice = automatic_attention(needs, **on, flash_package=False, training=True)
    assert choice.name == "flex"
    assert choice.reason.endswith(f", not varlen: {reason}")
    with pytest.raises(UserError, match=f"'varlen': {reason}"):
        resolved("varlen", needs=needs)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (AttentionNeeds(dropout=0.1), r"attention_dropout is 0\.1"),
        (AttentionNeeds(head_dim=576, value_dim=576), "this model's 576"),
        (AttentionNeeds(masked=True), "tell of documents by nothing else"),
    ],
)
def test_auto_is_sdpa_for_what_no_packed_attention_can_do(needs, reason):
    on = {"cuda": True, "bfloat16": True, "compute_dtype": "bfloat16"}
    choice = automatic_attention(needs, **on, flash_package=False, training=True)
    assert choice.name == "sdpa"
    for name in ("varlen", "flex"):
        with pytest.raises(UserError, match=f"'{name}': .*{reason}"):
            resolved(name, needs=needs)


def test_heads_wider_than_those_of_flash_attention_are_for_kernels_of_ours():
    needs = AttentionNeeds(head_dim=512, value_dim=512)
    on = {"cuda": True, "bfloat16": True, "compute_dtype": "bfloat16"}
    on |= {"flash_package": True}
    assert automatic_attention(needs, **on, training=True).name == "varlen"
    assert automatic_attention(needs, **on, training=False).name == "sdpa"
    without = automatic_attention(needs, **on, training=True, varlen_runs=False)
    assert without.name == "sdpa"
    assert resolved("varlen", needs=needs) == "varlen"
    with pytest.raises(UserError, match="flex': its heads are 256 wide at most"):
        resolved("flex", needs=needs)


SHARED = np.array([[0, 1, 2, 3, 2, 3]])  # positions of two answers to a prompt of two tokens


@pytest.fixture
def told(monkeypatch):
    """What kernels of the project are given; they and FlashAttention are for GPUs alone."""
    noted = []

    def kernels(bounds, tokens, **arguments):
        noted.append({"bounds": bounds.tolist(), "tokens": tokens, **arguments})
        return same

    same = Kernels(lambda q, *_: (q, q[..., 0]), None, sums_dim=1)
    monkeypatch.setattr(packed_attention, "document_kernels", kernels)
    monkeypatch.setattr(packed_attention, "varlen_kernels", lambda *_, **__: same)
    monkeypatch.setattr(document_attention, "usable", lambda *_: True)
    return noted


def attended(width, bounds, longest, **arguments):
    heads = [torch.randn(1, count, bounds[-1], width) for count in (4, 2, 2)]
    output, _ = varlen_attention(
        torch.nn.Module(), *heads, None, cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=longest, **arguments,
    )  # fmt: skip
    assert torch.equal(output[0], heads[0][0].transpose(0, 1))


@pytest.mark.parametrize(
    ("width", "ours"),
    [(56, False), (64, True), (128, True), (136, False), (256, False), (264, True)],
)
def test_varlen_hands_short_documents_and_wide_heads_to_kernels_of_ours(width, ours, told):
    """With the layer's bounds, scale and window."""
    attended(width, [0, 2, 6], 4, scaling=0.5, sliding_window=3)
    expected = {"bounds": [0, 2, 6], "tokens": 6, "scale": 0.5, "window": 3, "longest": 4}
    assert told == [expected] * ours


@pytest.mark.parametrize(
    ("bounds", "longest", "arguments", "ours"),
    [
        ([0, 1000, 2048], 1048, {}, True),
        ([0, 1000, 2049], 1049, {}, False),  # 1,024 tokens on average at most
        ([0, 1024, 2048], 1024, {}, False),  # of one length: cuDNN's
        ([0, 1000, 2048], 1048, {"flash_alone": True}, False),
        ([0, 4, 6], 4, {"shared_prompts": SharedPrompts.of(SHARED)}, False),  # more keys
    ],
)
def test_documents_are_short_on_average(bounds, longest, arguments, ours, told):
    attended(64, bounds, longest, **arguments)
    assert len(told) == ours


def test_short_documents_keep_results_too(told):
    """A layer that is computed again gets what its first forward kept."""
    kept = KeptResults()
    first, again = kept.contexts()
    with first:
        attended(64, [0, 2, 6], 4, kept=kept)
    with again, pytest.raises(AssertionError):
        attended(64, [0, 2, 6], 4, kept=kept)  # of other heads than the first


def test_kernels_that_cannot_be_built_leave_short_documents_to_flash_attention(told, monkeypatch):
    monkeypatch.setattr(document_attention, "usable", lambda *_: False)
    attended(64, [0, 2, 6], 4)
    assert not told
    assert takes_documents(torch.empty(6, 4, 264), 2, alike=True), "nothing else has such heads"


def test_wide_heads_are_for_kernels_of_ours_in_recordings_of_packages_too(told):
    attended(264, [0, 2, 6], 4, flash_alone=True)
    assert len(told) == 1


def test_queries_with_wide_heads_see_their_document_and_window():
    """Bounds are repeated at the end where a CUDA graph has room for more documents."""
    bounds = torch.tensor([0, 3, 4, 9, 9, 9], dtype=torch.int32)
    first, last = Seen.of(bounds, 9, None)
    assert first.tolist() == [0, 0, 0, 3, 4, 4, 4, 4, 4]
    assert last.tolist() == [3, 3, 3, 4, 9, 9, 9, 9, 9]
    first, last = Seen.of(bounds, 9, 2)
    assert first.tolist() == [0, 0, 1, 3, 4, 4, 5, 6, 7]
    assert last.tolist() == [2, 3, 3, 4, 6, 7, 8, 9, 9]


def test_flash_packages_are_not_chosen_for_what_they_would_leave_out():
    on = {"cuda": True, "bfloat16": True, "compute_dtype": "bfloat16", "flash_package": True}
    assert automatic_attention(SOFTCAP, **on, training=True).name == "flash_attention_2"
    assert automatic_attention(AttentionNeeds(sinks=True), **on, training=True).name == "flex"
    assert automatic_attention(AttentionNeeds(sinks=True), **on, training=False).name == "eager"
    masked = AttentionNeeds(masked=True)
    assert automatic_attention(masked, **on, training=True).name == "sdpa"
    assert "tell of documents by nothing else" in str(masked.obstacle("flash_attention_2"))


@pytest.mark.parametrize("flash_package", [False, True])
def test_layers_with_scores_of_their_own_are_eager_everywhere(flash_package):
    on = {"cuda": True, "bfloat16": True, "compute_dtype": "bfloat16"}
    for training in (False, True):
        choice = automatic_attention(
            EAGER_ALONE, **on, flash_package=flash_package, training=training
        )
        assert choice.name == "eager"
    for name in ("varlen", "flex"):
        with pytest.raises(UserError, match=f"'{name}': this model's layers compute their scores"):
            resolved(name, needs=EAGER_ALONE)
    with pytest.raises(UserError, match="'sdpa': the class of this model rules it out"):
        resolved("sdpa", needs=EAGER_ALONE)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.bfloat16, "it needs a GPU, and this runs on cpu"),
        (GPU, torch.float32, "it computes in 16 bits, and compute_dtype is float32"),
    ],
)
def test_varlen_where_it_cannot_run_is_refused(device, dtype, reason):
    with pytest.raises(UserError, match=f"model.attention = 'varlen': {reason}"):
        resolved("varlen", device, dtype=dtype)


@pytest.mark.parametrize("needs", [SOFTCAP, AttentionNeeds(sinks=True)])
def test_sdpa_for_what_it_ignores_is_refused(needs):
    with pytest.raises(UserError, match="it ignores the"):
        resolved("sdpa", needs=needs)


def test_boundaries_carry_the_names_that_attention_layers_pass_on():
    bounds, longest = document_bounds(torch.tensor([[0, 1, 0]]))
    assert flash_arguments(bounds, longest)["cu_seq_lens_k"] is bounds
    assert flash_arguments(bounds, longest)["max_length_q"] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"softcap": 50.0}, "softcap"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.zeros(5, 5)}, "attention_mask"),
        ({"s_aux": 1, "softcap": 2.0}, "s_aux, softcap"),
    ],
)
def test_varlen_refuses_whatever_it_would_leave_out(arguments, named):
    """Sinks, for instance: the check of the family uses the same attention, so it would not
    notice."""
    heads = (torch.zeros(1, 2, 5, 16),) * 3
    bounds = flash_arguments(torch.tensor([0, 5], dtype=torch.int32), 5)
    told = {"attention_mask": None} | bounds | arguments
    assert refusal(varlen_attention, torch.nn.Linear(1, 1), *heads, **told) == (
        f"model.attention = 'varlen': Linear asks its attention for {named}, which varlen cannot "
        "do, and the model would be trained without. Set it to flex."
    )


TOKENS, WIDTH = 13, 8


def attend(query, key, value):
    """Causal attention of heads (tokens, heads, width), and its logarithms of sums."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def kernels(seen):
    """Kernels that note the heads of keys of each backward, and check what they get."""

    def backward(grad, query, key, value, output, sums, state):
        seen.append(key.shape[1])
        assert grad.is_contiguous()
        assert output.is_contiguous()
        assert state.item() == 7
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            again, sums_again = attend(*leaves)
        torch.testing.assert_close((output, sums), (again.detach(), sums_again.detach()))
        return torch.autograd.grad(again, leaves, grad)

    return Kernels(lambda *heads: (*attend(*heads), torch.tensor(7)), backward, sums_dim=0)


@pytest.mark.parametrize(
    ("heads", "groups"),
    [((1, 1), [1]), ((6, 3), [1, 1, 1]), ((11, 11), [2] * 5 + [1]), ((40, 8), [1] * GROUPS)],
)
def test_gradients_are_those_of_all_heads_at_once(heads, groups):
    draw = torch.Generator().manual_seed(0)
    sizes = [(TOKENS, count, WIDTH) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(x, dtype=torch.float64, generator=draw).requires_grad_() for x in sizes]
    grad = torch.randn(sizes[0], dtype=torch.float64, generator=draw)
    seen: list[int] = []
    output = by_head_groups(kernels(seen), *inputs)
    expected, _ = attend(*inputs)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output, inputs, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, grad))
    assert seen == groups


def test_all_heads_at_once_are_handed_on_without_copies():
    """As autograd of torch does: cuDNN's outputs have other strides than its inputs' shapes."""
    made, seen = [], []

    def forward(query, *_):
        made.append(query.mul(2.0).transpose(0, 1).contiguous().transpose(0, 1))
        return made[0], query[..., 0]

    def backward(grad, query, key, value, output, sums):
        seen.append(output.data_ptr())
        return grad, grad, grad

    heads = torch.randn(3, TOKENS, 2, WIDTH).requires_grad_().unbind()
    by_head_groups(Kernels(forward, backward, sums_dim=1), *heads, groups=1).sum().backward()
    assert seen == [made[0].data_ptr()]


@pytest.mark.parametrize("kind", ["varlen", "cudnn"])
def test_arguments_of_kernels_are_those_of_torch_s_operators(kind):
    """On tensors without memory: operators check their arguments and make the shapes."""
    if kind == "varlen":
        sizes = [(TOKENS, heads, WIDTH) for heads in (4, 2, 2)]
        bounds = torch.empty(2, dtype=torch.int32, device="meta")
        tested = varlen_kernels(
            *(bounds, bounds, TOKENS, TOKENS),
            scale=None,
            window=(-1, 0),
        )
    else:
        sizes = [(2, heads, TOKENS, WIDTH) for heads in (4, 2, 2)]
        tested = cudnn_kernels(None, TOKENS)
    inputs = [torch.empty(x, dtype=torch.bfloat16, device="meta") for x in sizes]
    output, sums, *others = tested.forward(*inputs)
    assert sums.shape[tested.sums_dim] == 4
    made = tested.backward(torch.empty_like(output), *inputs, output, sums, *others)
    assert [tuple(x.shape) for x in made] == sizes

"""Mixtures on a GPU, by grouped matmuls, against the CPU's loop over experts."""

import pytest
import torch

from tests.support.expert_kernel_cases import float8_matmuls, gates, matmuls, sums, transpositions
from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, quantized

pytestmark = pytest.mark.gpu
# Each token goes to all experts: a rounding decides between none.
ALL = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 8},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
}


def logits_and_gradients(base, device, dtype):
    """Return them for adapters whose B is not 0."""
    training = adapted(base, attention="eager", device=device, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    trained = [p for p in training.parameters() if p.requires_grad]
    with torch.no_grad():
        for param in trained:
            param.add_(0.05 * torch.randn(param.shape, generator=draw).to(device))
    ids = torch.randint(0, 211, (1, 48), generator=draw).to(device)
    places = torch.arange(48, device=device)
    logits = training.logits(ids, places[None], places)
    weights = torch.randn(logits.shape, generator=draw).to(device)
    gradients = torch.autograd.grad((logits * weights).sum(), trained)
    return [tensor.detach().float().cpu() for tensor in (logits, *gradients)]


@pytest.mark.parametrize("family", ALL)
def test_mixture_in_bf16_is_as_near_to_fp32_as_on_the_cpu(family, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    source = tiny_mixture(family, tmp_path / "original", **ALL[family])
    base = quantized(source, tmp_path / "nf4")
    exact, here, there = (
        logits_and_gradients(base, device, dtype)
        for device, dtype in (
            ("cpu", torch.float32),
            ("cpu", torch.bfloat16),
            ("cuda", torch.bfloat16),
        )
    )
    for value, ours, theirs in zip(exact, there, here, strict=True):
        size = float(value.norm())
        rounded = float((theirs - value).norm())
        assert rounded <= 0.2 * size
        assert float((ours - value).norm()) <= 2 * rounded + 1e-3 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_compute_what_the_loop_over_experts_does(dtype):
    """Sizes of whole tiles and of parts, ranks of more than a program's. Sums are fp32; values are
    rounded once."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    there = {"dtype": dtype, "device": "cuda"}
    for pairs in (
        matmuls(width=512, columns=768, rank=16, num_tokens=900, **there),
        matmuls(width=96, columns=200, rank=8, num_tokens=150, **there),
        matmuls(width=96, columns=72, rank=72, num_tokens=150, **there),
        sums(columns=200, rank=14, num_tokens=300, **there),
        sums(columns=200, rank=70, num_tokens=300, **there),
        gates(width=768, num_tokens=50, **there),
        transpositions(**there),
    ):
        for ours, expected in pairs:
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                ours.float().cpu(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps * largest
                if dtype != torch.float32 else 1e-5 * largest,
            )  # fmt: skip


def test_float8_products_are_the_cpu_s():
    """Weights bit by bit; sums on the GPU have fewer bits (fast accumulation)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no GPU with float8")
    pairs = float8_matmuls(width=192, columns=320, num_tokens=300, device="cuda", interpreted=False)
    for number, (ours, expected) in enumerate(pairs):
        if number % 2 == 0:
            assert torch.equal(ours.cpu(), expected)
        else:
            atol = 2**-7 * float(expected.abs().max())
            torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=atol)

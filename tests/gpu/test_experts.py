"""Mixtures on a GPU, by grouped products, against the CPU's loop over experts."""

from pathlib import Path

import pytest
import torch

from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, quantized

pytestmark = pytest.mark.gpu
# Each token goes to all experts: a rounding decides between none.
ALL = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 8},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
}


def logits_and_gradients(base: Path, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
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
def test_mixture_in_bf16_is_as_near_to_fp32_as_on_the_cpu(family: str, tmp_path: Path) -> None:
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

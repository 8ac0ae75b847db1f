"""What calibrating a layer takes of a GPU, and the error where it has less."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.mixtures import tiny_mixture
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.quantization.calibration_memory import check_gpu_memory, layer_bytes
from workflow.lib.quantization.calibration_rows import BATCH_TOKENS
from workflow.lib.system.errors import UserError

GPU = torch.device("cuda")


def layer() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"up": nn.Linear(96, 160), "down": nn.Linear(160, 96, bias=False)})


def test_bytes_of_a_small_layer_by_hand() -> None:
    weights = 4 * (96 * 160 * 2 + 160)
    expected = 4 * (3 * 160**2 + 7 * 96 * 160) + 5 * weights // 2 + 3 * 4 * BATCH_TOKENS * 160
    assert layer_bytes(layer()) == expected


def test_scores_count_where_they_are_more_than_the_matrices() -> None:
    """Attention has ended before a linear is rounded."""
    matrices = 4 * (3 * 160**2 + 7 * 96 * 160)
    assert layer_bytes(layer(), scores=matrices // 8) == layer_bytes(layer())
    assert layer_bytes(layer(), scores=10**6) == layer_bytes(layer()) - matrices + 8 * 10**6


@pytest.mark.parametrize("enough", [True, False])
def test_too_little_memory_is_told_with_both_numbers(
    enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = layer_bytes(layer()) - (0 if enough else 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    if enough:
        check_gpu_memory([layer()], GPU)
        return
    with pytest.raises(UserError, match=r"quantize.method = 'calibrated'.*0.0 GiB.*absmax"):
        check_gpu_memory([layer()], GPU)


def test_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace())
    check_gpu_memory([layer()], torch.device("cpu"))


def test_experts_of_a_layer_are_counted_once_and_their_originals_on_the_host(
    tmp_path: Path,
) -> None:
    model = build_on_meta(tiny_mixture("qwen3_moe", tmp_path), dtype=torch.bfloat16)
    layer = model.model.layers[0]
    in_stacks = 2 * 11 * (96 * 64 + 64 * 48)
    weights = sum(p.nbytes for p in layer.parameters())
    largest = 96 * 64  # of an expert; 64 x 64 are those of attention
    expected = weights + 3 * (weights - in_stacks) // 2
    expected += 4 * (3 * 64**2 + 7 * largest) + 3 * 4 * BATCH_TOKENS * 64
    expected += 2 * 10 * BATCH_TOKENS * (96 + 64 + 64 + 48) + 4 * 5 * (11 * largest) // 64
    assert layer_bytes(layer) == expected

"""Where a step's time goes: kernels by kind, and what is left when none runs."""

import pytest
import torch

from workflow.lib.benchmark.profiling import OTHER, kind, profiled, summed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("void pytorch_flash::flash_fwd_kernel<bf16>", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16>", "dequantization"),
        ("decode_eight_bits", "dequantization"),
        ("nvjet_sm90_tst_320x128_64x3", "products"),
        ("Memcpy HtoD (Pinned -> Device)", "host copies"),
        ("Memcpy DtoD (Device -> Device)", "device copies"),
        ("void at::native::CatArrayBatchedCopy", "device copies"),
        ("act_and_mul_backward", OTHER),
    ],
)
def test_kernel_is_told_by_its_name(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_gpu_is_idle_where_no_stream_has_a_kernel() -> None:
    spans = [("nvjet", 1.0, 3.0), ("ncclAllGather", 2.0, 4.0), ("nvjet", 6.0, 7.0)]
    found = summed(spans, step_s=10.0)
    assert found.kinds == {"products": 3.0, "communication": 2.0}
    assert found.idle_s == 10.0 - (4.0 - 1.0) - (7.0 - 6.0)
    assert found.kernels[0] == ("nvjet", 3.0, 2)


def test_cpu_has_a_time_and_no_kernels() -> None:
    found = profiled(lambda: torch.ones(8).sum(), device=torch.device("cpu"))
    assert found.step_s > 0
    assert (found.kinds, found.kernels) == ({}, [])

"""What `train.matmul_dtype` means on which hardware."""

import pytest

from workflow.lib.system.dtype_choice import (
    MatmulHardware,
    check_float8_shape,
    choose_matmul_dtype,
)
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import BY_NAME

CPU = MatmulHardware(cuda=False, float8=True)


def hardware(name):
    gpu = BY_NAME[name]
    return MatmulHardware(cuda=True, float8=gpu.float8)


@pytest.mark.parametrize(
    ("gpu", "chosen"),
    [
        ("NVIDIA H200", "float8"),
        ("NVIDIA GeForce RTX 4090", "float8"),
        ("NVIDIA RTX 6000 Ada Generation", "float8"),
        ("NVIDIA RTX A6000", "compute_dtype"),
        ("NVIDIA A100-SXM4-80GB", "compute_dtype"),
        ("NVIDIA GeForce RTX 3090", "compute_dtype"),
        ("AMD Instinct MI300X", "compute_dtype"),
    ],
)
def test_auto_is_the_fastest_that_the_gpu_has(gpu, chosen):
    assert choose_matmul_dtype("auto", hardware(gpu), compute_dtype="bfloat16") == chosen


def test_auto_leaves_the_emulation_and_other_compute_types_alone():
    assert choose_matmul_dtype("auto", CPU, compute_dtype="float32") == "compute_dtype"
    card = hardware("NVIDIA H200")
    assert choose_matmul_dtype("auto", card, compute_dtype="float32") == "compute_dtype"


def test_cpu_emulates_what_is_asked_for():
    assert choose_matmul_dtype("float8", CPU, compute_dtype="float32") == "float8"


@pytest.mark.parametrize(
    ("gpu", "name", "message"),
    [
        ("NVIDIA RTX A6000", "float8", r"compute capability 8\.9\). Set it to auto"),
        ("AMD Instinct MI300X", "float8", r"compute capability 8\.9\). Set it to auto"),
    ],
)
def test_type_that_a_gpu_lacks_is_refused(gpu, name, message):
    with pytest.raises(UserError, match=message):
        choose_matmul_dtype(name, hardware(gpu), compute_dtype="bfloat16")


def test_other_compute_type_on_a_gpu_is_refused():
    with pytest.raises(UserError, match=r"compute dtype bfloat16, and model\.compute_dtype means"):
        choose_matmul_dtype("float8", hardware("NVIDIA H200"), compute_dtype="float16")


@pytest.mark.parametrize("shape", [(48, 96), (40, 128), (48, 100)])
def test_linear_that_8_bits_cannot_multiply_is_named(shape):
    check_float8_shape("model.layers.3.up_proj", (48, 128), block_size=64)
    with pytest.raises(UserError, match=r"matmul_dtype = float8: model.layers.3.up_proj .*multip"):
        check_float8_shape("model.layers.3.up_proj", shape, block_size=64)

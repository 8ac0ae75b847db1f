"""The table of GPUs: what people write finds one, and what they mistype is answered with what is
near."""

import pytest

from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import BY_NAME, MODELS, OTHER_EXAMPLE, parse_gpu, parse_gpus

MISTYPED = ("4095x2", "4095:2", "2*4095")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("2x4090", 2, "NVIDIA GeForce RTX 4090"),
        ("8 x h100", 8, "NVIDIA H100 80GB HBM3"),
        ("RTX 3090", 1, "NVIDIA GeForce RTX 3090"),
        ("4xA100-40", 4, "NVIDIA A100-SXM4-40GB"),
        ("1xNVIDIA RTX 6000 Ada Generation", 1, "NVIDIA RTX 6000 Ada Generation"),
        ("2xmi300x", 2, "AMD Instinct MI300X"),
        ("4090x2", 2, "NVIDIA GeForce RTX 4090"),
        ("2*4090", 2, "NVIDIA GeForce RTX 4090"),
        ("RTX4090:2", 2, "NVIDIA GeForce RTX 4090"),
        ("mi300x x 8", 8, "AMD Instinct MI300X"),
    ],
)
def test_count_and_kind_are_read_from_what_people_write(text, count, name):
    assert parse_gpus(text, setting="--gpus") == (count, BY_NAME[name])


def test_another_kind_has_its_figures_behind_its_name():
    for text in (OTHER_EXAMPLE, f"1x{OTHER_EXAMPLE}"):
        count, model = parse_gpus(text, setting="--gpus")
        assert (count, model.name, model.memory_gib) == (1, OTHER_EXAMPLE, 15.7)
        assert (model.flops, model.bandwidth, model.float8) == (97.5e12, 717e9, True)
    assert parse_gpu(OTHER_EXAMPLE, setting="hardware.gpu_model") == model
    with pytest.raises(UserError, match=r"figures behind its name: NVIDIA GeForce RTX 4080 \(15"):
        parse_gpus("RTX 4080 (15.7 GiB)", setting="--gpus")


def test_every_alias_means_one_gpu_only():
    for model in MODELS:
        for alias in (model.name, *model.aliases):
            assert parse_gpus(f"3x{alias}", setting="--gpus") == (3, model)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x4095", r"--gpus = '2x4095'.*'4095' is known.*Did you mean 4090"),
        ("rtx4099", r"name 'rtx4099' is .*Did you mean 4090, 5090"),
        ("2xtpu", r"Known are 3090, 40"),
        *((text, r"name '4095' is known\. Write .* like 2x4090\. Did you") for text in MISTYPED),
        ("3090x4090", r"'3090x4090': either number can be the kind\. Write the"),
        ("0x4090", "must be 1 to 4096"),
        ("99999x4090", "must be 1 to 4096"),
    ],
)
def test_what_is_mistyped_is_answered_with_the_nearest_the_form_or_the_bound(text, said):
    with pytest.raises(UserError, match=said):
        parse_gpus(text, setting="--gpus")


def test_kind_alone_is_no_place_for_a_number():
    assert parse_gpu("h100", setting="hardware.gpu_model") is BY_NAME["NVIDIA H100 80GB HBM3"]
    with pytest.raises(
        UserError, match=r"the kind of GPU alone\. Set it to H100, and hardware\.gpus"
    ):
        parse_gpu("2xH100", setting="hardware.gpu_model")

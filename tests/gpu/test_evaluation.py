"""What is measured on one GPU is measured on two: a copy of the model on each, or a slice."""

from functools import partial

import pytest

from tests.export.test_sharded_models import evaluate, in_two_processes, make_export, make_settings
from tests.support.distributed import run_distributed
from workflow.lib.settings.forms import SUBJECTS

pytestmark = pytest.mark.gpu


def test_slices_and_copies_on_two_gpus_measure_what_one_gpu_does(tmp_path, two_gpus):
    """All subjects in float32: losses, answers, items of tasks; and each GPU holds half of the
    slices."""
    folder = make_export(tmp_path)
    settings = make_settings(folder)
    alone = evaluate(folder, settings.model_copy(update={"batch_size": 5}), "cuda", world=None)
    work = partial(in_two_processes, folder, settings, "cuda")
    first, second = run_distributed(work, world_size=two_gpus)
    assert (first.sliced, first.copied) == (second.sliced, second.copied)
    assert (first.held, second.held) == pytest.approx((0.5, 0.5), abs=0.05)
    assert "incomplete does not fit the model: of its tensors, 1 missing" in first.refusal
    assert alone.keys() == set(SUBJECTS)
    for found in (first.sliced, first.copied):
        for subject, expected in alone.items():
            sums, counts = zip(*found[subject].losses, strict=True)
            expected_sums, expected_counts = zip(*expected.losses, strict=True)
            assert counts == expected_counts
            assert sums == pytest.approx(expected_sums, rel=1e-4)
            assert found[subject].answers == expected.answers
            assert found[subject].tasks.items == expected.tasks.items

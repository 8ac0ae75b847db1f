"""Answers whose tokens are CUDA graphs are those of Transformers' `generate`."""

import pytest
import torch

from tests.evaluation.test_token_steps import MOST, NO_STOP, ROWS, draw, windows
from tests.support.models import random_llama
from tests.support.tiny import VOCAB_SIZE
from workflow.lib.evaluation import token_steps
from workflow.lib.evaluation.sample_answers import continue_rows, likeliest

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("make", [windows, lambda: random_llama(vocab_size=VOCAB_SIZE)])
@pytest.mark.parametrize("drawn", [False, True])
def test_answers_by_graphs_are_those_of_generate(make, drawn, caplog, one_gpu):
    """In float32; `generate` runs a model with eager attention."""
    model = make().to(GPU).eval()

    def rows():
        pick = draw() if drawn else likeliest
        if drawn:
            pick.uniforms, pick.log_probs = pick.uniforms.to(GPU), pick.log_probs.to(GPU)
        how = {"stop_ids": [NO_STOP], "max_new_tokens": MOST, "device": GPU}
        return continue_rows(model, ROWS, pick=pick, **how), drawn and pick.log_probs

    assert token_steps.takes_steps(model, GPU)
    answers, log_probs = rows()
    assert not caplog.records
    model.set_attn_implementation("eager")
    assert not token_steps.takes_steps(model, GPU)
    expected, expected_log_probs = rows()
    assert answers == expected
    if drawn:
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-3)

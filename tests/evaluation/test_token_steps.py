"""Generation with a cache of fixed size, against Transformers' `generate`; a capture is a call."""

import logging

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.support.captures import Captures
from tests.support.models import random_llama
from tests.support.tiny import VOCAB_SIZE
from workflow.lib.evaluation.sample_answers import _left_padded, continue_rows, likeliest
from workflow.lib.evaluation.token_steps import LOOKED, continue_by_steps, takes_steps
from workflow.lib.rounds.generation import Request, _Draw

CPU = torch.device("cpu")
ROWS = [[5, 6, 7, 8, 9, 10, 11], [9], [4, 4, 4, 8, 11]]
MOST = 2 * LOOKED + 5
NO_STOP = VOCAB_SIZE - 1


def windows():
    """Every second layer sees 7 tokens, less than a prompt and an answer have."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": VOCAB_SIZE}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=7, layer_types=kinds, initializer_range=0.2,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


@pytest.fixture(scope="module", params=["llama", "windows"])
def model(request):
    if request.param == "windows":
        return windows().eval()
    return random_llama(vocab_size=VOCAB_SIZE, num_hidden_layers=2).eval()


def draw():
    uniforms = torch.stack([torch.from_numpy(Request(row, 0, 3).uniforms(MOST)) for row in ROWS])
    return _Draw(uniforms, 1.0, 0.9, torch.zeros(uniforms.shape))


def generated(model, pick=likeliest):
    how = {"stop_ids": [NO_STOP], "max_new_tokens": MOST, "device": CPU}
    return continue_rows(model, ROWS, pick=pick, **how)


def by_steps(model, capture, *, pick=likeliest, ended=lambda answer: False):
    ids, mask = _left_padded(ROWS, device=CPU)
    how = {"pick": pick, "ended": ended, "max_new_tokens": MOST, "capture": capture}
    return continue_by_steps(model, ids, mask, **how)


def test_tokens_are_those_of_generate(model):
    capture = Captures()
    rows = by_steps(model, capture)
    assert rows == generated(model)
    assert all(len(row) == MOST for row in rows)
    assert (capture.count, capture.replays) == (1, MOST - 2)


def test_drawn_tokens_and_their_log_probabilities_are_those_of_generate(model):
    expected, drawn = draw(), draw()
    assert by_steps(model, Captures(), pick=drawn) == generated(model, pick=expected)
    torch.testing.assert_close(drawn.log_probs, expected.log_probs, rtol=0, atol=1e-4)


def test_steps_end_at_the_look_after_the_last_row_has_ended(model):
    whole = generated(model)
    ends = [whole[0][3], whole[1][LOOKED + 1], whole[2][7]]
    rows = by_steps(model, Captures(), ended=lambda answer: answer[-1] in ends)
    length = len(rows[0])
    assert rows == [row[:length] for row in whole]
    assert length % LOOKED == 0
    last = max(min(row.index(end) for end in ends if end in row) for row in whole)
    assert length - LOOKED <= last < length


def test_token_that_cannot_be_captured_is_launched_each_time(model, caplog):
    with caplog.at_level(logging.WARNING, "workflow"):
        assert by_steps(model, Captures(fails=True)) == generated(model)
    assert "not permitted when stream is capturing" in caplog.text
    assert "and more" not in caplog.text


def test_memory_that_runs_out_in_a_capture_is_for_the_caller(model):
    """Also if the end of the capture fails after it, as torch's does."""

    def capture(function):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with pytest.raises(torch.OutOfMemoryError):
        by_steps(model, capture)


def test_a_model_takes_steps_on_a_gpu_if_nothing_depends_on_values(model):
    gpu = torch.device("cuda", 0)
    assert takes_steps(model, gpu)
    assert not takes_steps(model, CPU)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not takes_steps(random_llama(rope_parameters=dynamic), gpu)
    hybrid = random_llama()
    hybrid.config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    assert not takes_steps(hybrid, gpu)
    eager = random_llama()
    eager.set_attn_implementation("eager")
    assert not takes_steps(eager, gpu)

"""Experts by calibration: which tokens calibrate each, and that each is rounded as a linear is."""

import pytest
import torch
from torch import nn

from tests.support.mixtures import tiny_mixture
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import experts_modules
from workflow.lib.quantization import calibration
from workflow.lib.quantization.calibrated_rounding import decode, error_feedback, round_calibrated
from workflow.lib.quantization.calibration import loaded_stacks, quantize_experts
from workflow.lib.quantization.layer_inputs import Counted, ExpertTokens, expert_tokens
from workflow.lib.settings.config import QuantizeConfig

PLAIN = QuantizeConfig(double_quant=False)
STACKS = ("e.gate_up_proj", "e.up_proj", "e.down_proj")


def experts_of(family, folder):
    """The experts of the last layer, with random weights."""
    torch.manual_seed(2)
    model = Checkpoint(tiny_mixture(family, folder)).build(torch.float32)
    *_, (_, experts) = experts_modules(model)
    experts.to_empty(device="cpu")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts.requires_grad_(False)


def tokens_for(experts, *, count):
    """Tokens of which the first experts get more than the last."""
    torch.manual_seed(3)
    chances = torch.rand(count, experts.num_experts) * torch.linspace(1.3, 1, experts.num_experts)
    states = torch.randn(count, 64) @ torch.randn(64, 64)
    return ExpertTokens(states, chances.topk(2).indices)


def correlation(rows):
    return rows.T @ rows / len(rows)


def rounded(weight, rows):
    feedback = error_feedback(correlation(rows), what="w")
    return decode(round_calibrated(weight.contiguous(), feedback, PLAIN), block_size=64)


# Gated; transposed, with biases and a gate of its own.
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_expert_is_rounded_as_a_linear_that_sees_its_tokens(family, tmp_path):
    experts = experts_of(family, tmp_path)
    tokens = tokens_for(experts, count=1500)
    before = {name: stack.expert(2) for name, stack in loaded_stacks(experts).items()}
    list(quantize_experts(experts, tokens, PLAIN, path="e", paths=STACKS))
    (up, first), (down, second) = loaded_stacks(experts).items()
    rows = tokens.states[(tokens.chosen == 2).any(1)]
    assert len(rows) > 96
    torch.testing.assert_close(first.expert(2), rounded(before[up], rows))
    bias = experts.gate_up_proj_bias[2] if experts.has_bias else 0.0
    between = experts._apply_gate(rows @ first.expert(2).T + bias)
    torch.testing.assert_close(second.expert(2), rounded(before[down], between))


def test_tokens_of_an_expert_alone_calibrate_it_where_there_are_enough():
    states = torch.arange(12.0).view(12, 1)
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2]]).repeat(4, 1)
    (rows,) = ExpertTokens(states, chosen).of(0, in_features=32)
    assert rows.flatten().tolist() == [0, 2, 3, 5, 6, 8, 9, 11]


@pytest.mark.parametrize(
    ("in_features", "expected"),
    [(40, [9, 0, 1, 2, 3, 4, 5, 6, 7, 8]), (16, [9, 0, 3, 6]), (99, [9, *range(9)])],
)
def test_tokens_of_other_experts_fill_up_evenly(in_features, expected):
    states, chosen = torch.arange(10.0).view(10, 1), torch.zeros(10, 1, dtype=torch.int64)
    chosen[9] = 1
    (rows,) = ExpertTokens(states, chosen).of(1, in_features=in_features)
    assert rows.flatten().tolist() == expected


def test_expert_without_any_token_is_calibrated_by_those_of_others_and_told(tmp_path, caplog):
    caplog.set_level("INFO", "workflow")
    experts = experts_of("mixtral", tmp_path)
    tokens = tokens_for(experts, count=300)
    tokens.chosen[tokens.chosen == 2] = 1
    weight = next(iter(loaded_stacks(experts).values())).expert(2)
    name, _ = next(quantize_experts(experts, tokens, PLAIN, path="e", paths=STACKS))
    assert "e: 1 of 3 experts got fewer than 16 tokens" in caplog.text
    spread = tokens.states[torch.arange(16) * 300 // 16]
    ours = loaded_stacks(experts)[name].expert(2)
    torch.testing.assert_close(ours, rounded(weight, spread))


def test_only_tokens_that_count_calibrate(tmp_path):
    experts = experts_of("mixtral", tmp_path)
    states, chosen = torch.randn(6, 64), torch.tensor([[0, 1]]).repeat(6, 1)
    counted = torch.tensor([[True, False, True], [True, True, False]])
    run = lambda: experts(states, chosen, torch.full((6, 2), 0.5))  # noqa: E731
    found = expert_tokens("e", experts, [(run, Counted(counted.flatten())), (run, Counted())])
    torch.testing.assert_close(found.states, torch.cat([states[[0, 2, 3, 4]], states]))
    assert found.chosen.shape == (10, 2)


def test_tokens_go_through_an_expert_in_parts(tmp_path, monkeypatch):
    whole, parts = (experts_of("qwen3_moe", tmp_path / name) for name in ("whole", "parts"))
    tokens = tokens_for(whole, count=900)
    _, one = (
        packed for _, packed in quantize_experts(whole, tokens, PLAIN, path="e", paths=STACKS)
    )
    monkeypatch.setattr("workflow.lib.quantization.layer_inputs.TOKENS_AT_ONCE", 37)
    _, other = (
        packed for _, packed in quantize_experts(parts, tokens, PLAIN, path="e", paths=STACKS)
    )
    same = one.codes == other.codes
    assert same.float().mean() > 0.98, "sums in another order"


def test_no_more_than_one_expert_is_rounded_at_a_time(tmp_path, monkeypatch):
    experts, shapes = experts_of("qwen3_moe", tmp_path), set()
    whole = calibration.codes_with_feedback

    def looked(weight, *others, **named):
        shapes.add(tuple(weight.shape))
        assert weight.untyped_storage().nbytes() == weight.nbytes
        return whole(weight, *others, **named)

    monkeypatch.setattr(calibration, "codes_with_feedback", looked)
    list(quantize_experts(experts, tokens_for(experts, count=200), PLAIN, path="e", paths=STACKS))
    assert shapes == {(96, 64), (64, 48)}

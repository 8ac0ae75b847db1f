"""That the attention of a training is compared with the family's own before the first step."""

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.captures import ALONE
from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, base_fixture, quantized, random_store, tiny_gemma2
from workflow.lib.model import prepared_decoder
from workflow.lib.system.errors import UserError
from workflow.lib.training.startup_checks import PACKED_TOLERANCE, check_attention

# With a cap that bites, and windows of 7 tokens in every other layer.
base = base_fixture(tiny_gemma2, attn_logit_softcapping=0.5, initializer_range=0.3)


def store(seq_len=37):
    found = random_store(rows=3, seq_len=seq_len, seed=3)
    found.input_ids[:] %= 101
    return found


@pytest.mark.parametrize("attention", ["eager", "flex"])
@pytest.mark.parametrize("seq_len", [5, 37, 300])
def test_attention_that_does_what_the_family_does_passes(base, attention, seq_len):
    check = check_attention(adapted(base, attention=attention), store(seq_len), ALONE)
    assert check.passed
    assert check.detail.endswith(f"over {min(seq_len, 256)} tokens")
    assert float(check.detail.split()[1]) < 1e-5


def test_row_has_as_many_more_documents_as_rows_of_the_training(base, monkeypatch):
    """So that attention chooses the same kernels."""
    training, rows, noted = adapted(base, attention="eager"), store(300), []
    rows.position_ids[:] = np.arange(300) % 30
    states = training.hidden_states

    def hidden_states(ids, positions):
        noted.append(positions)
        return states(ids, positions)

    monkeypatch.setattr(training, "hidden_states", hidden_states)
    check_attention(training, rows, ALONE)
    assert (noted[0] == 0).sum() == 3 + 10


def uncapped(module, *heads_and_mask, softcap, **told):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *heads_and_mask, **told)


AttentionInterface.register("uncapped", uncapped)
AttentionMaskInterface.register("uncapped", sdpa_mask)


def test_attention_that_leaves_out_the_caps_is_refused(base):
    training = adapted(base, attention="uncapped")
    with pytest.raises(UserError, match="Gemma2ForCausalLM have other hidden states than each"):
        check_attention(training, store(), ALONE)


def config_of(training):
    return training.peft_model.get_base_model().config


def test_window_that_a_layer_does_not_tell_is_refused(base):
    """Though no document that is tried is as long as the window."""
    training = adapted(base, attention="flex")
    config = config_of(training)
    config.sliding_window = 4096
    for layer in training.peft_model.get_base_model().model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UserError, match=r"masks what is beyond 4096 tokens, and tells .* None"):
        check_attention(training, store(), ALONE)


def test_attention_is_as_before_after_the_check(base):
    training = adapted(base, attention="flex")
    config_of(training).sliding_window = 4096
    with pytest.raises(UserError):
        check_attention(training, store(), ALONE)
    assert config_of(training)._attn_implementation == "flex"
    assert not hasattr(config_of(training), "workflow_told_alone")


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory):
    """Gemma 4, whose scores are as large as its heads are wide, in bf16."""
    folder = tmp_path_factory.mktemp("gemma4")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128, "global_head_dim": 128}
    config = Gemma4TextConfig(
        vocab_size=101, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, pad_token_id=0, **sizes,
    )  # fmt: skip
    Gemma4ForCausalLM(config).save_pretrained(folder / "original")
    base = quantized(folder / "original", folder / "nf4")
    return adapted(base, attention="sdpa", dtype=torch.bfloat16)


@torch.no_grad()
def test_rounding_that_grows_from_layer_to_layer_is_no_difference(unscaled):
    ids = torch.from_numpy(store().input_ids[:1].astype("int64"))
    ours, theirs = (
        hidden_states(ids, torch.arange(ids.shape[1])[None]).float()
        for hidden_states in (unscaled.hidden_states, unscaled.family_hidden_states)
    )
    at_end = (ours - theirs).norm() / theirs.norm()
    in_one_layer = float(check_attention(unscaled, store(), ALONE).detail.split()[1])
    assert 5 * in_one_layer < min(PACKED_TOLERANCE[torch.bfloat16], at_end)


def test_attention_across_documents_is_found_in_spite_of_rounding(unscaled, monkeypatch):
    whole = prepared_decoder.decoder_inputs

    def joined(attention, ids, *args):
        return whole(attention, ids, torch.arange(ids.shape[1]).expand_as(ids), None)

    monkeypatch.setattr(prepared_decoder, "decoder_inputs", joined)
    with pytest.raises(UserError, match=r"in one layer they differ by 0\.\d+ of what it adds"):
        check_attention(unscaled, store(), ALONE)


def leaking(training):
    """Make the hidden states depend on the token before, whatever its document."""
    decoder = training.peft_model.get_base_model().get_decoder()
    decoder.norm.register_forward_hook(lambda _, args, output: output + output.roll(1, dims=1))
    return training


def test_state_that_passes_from_document_to_document_is_refused_where_rows_have_several(base):
    with pytest.raises(UserError, match=r"data\.packing to false"):
        check_attention(leaking(adapted(base, attention="eager")), store(), ALONE)


def test_documents_that_have_a_row_each_are_compared_alone(base):
    alone = store()
    alone.position_ids[:] = range(37)
    training = adapted(base, attention="eager")
    assert check_attention(training, alone, ALONE).passed


@pytest.fixture
def undecided(tmp_path):
    """A mixture of two experts of four a token, of which two have nearly one score."""
    source = tiny_mixture("mixtral", tmp_path / "original")
    training = adapted(quantized(source, tmp_path / "nf4"), attention="sdpa")
    for module in training.modules():
        if type(module).__name__.endswith("Router"):
            weight = module.weight
            weight.data[1] = weight.data[0] * (1 + 2e-7 * torch.randn(weight.shape[1]))
    return training


def test_experts_of_nearly_one_score_are_no_difference(undecided):
    check = check_attention(undecided, store(300), ALONE)
    assert float(check.detail.split()[1]) < 1e-5


def test_state_that_passes_between_documents_of_a_mixture_is_refused(undecided):
    with pytest.raises(UserError, match=r"data\.packing to false"):
        check_attention(leaking(undecided), store(), ALONE)

"""The order in which a model is made ready, and the checks before its first step."""

from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint

from tests.support.built_models import built_model
from tests.support.captures import ALONE
from tests.support.distributed import run_in_group
from tests.support.models import adapted, base_fixture, quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from tests.support.refusals import refusal
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss.chunked_loss import OutputHead
from workflow.lib.settings.config import (
    HardwareConfig,
    LoraSettings,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from workflow.lib.system.errors import UserError
from workflow.lib.training.build import TrainingModel
from workflow.lib.training.startup_checks import check_family, check_recomputation, startup_checks

base = base_fixture(attention_dropout=0.5)


def empty_row(store):
    store.loss_mask[1] = False
    return store


def checks(world, base):
    """Build one model in this group; return what the checks say of it and of what is wrong with
    it."""
    found = {}
    config = RunConfig(
        model=ModelConfig(attention_dropout="family"), lora=LoraSettings(r=2, dropout=0.5)
    )
    model = built_model(base, config, make_plan(), world)
    found["passed"] = startup_checks(
        model, random_store(rows=3, seq_len=11), Checkpoint(base), world
    )
    found["gradients"] = [
        p.grad for p in trainable_parameters(model.training).values() if p.grad is not None
    ]
    cases = {
        "empty row": lambda: startup_checks(
            model, empty_row(random_store(rows=3, seq_len=11)), Checkpoint(base), world
        ),
        "drawn anew": lambda: check_recomputation(
            drawing_anew(model), random_store(rows=3, seq_len=11), world
        ),
        "other head": lambda: check_family(
            other_head(model), random_store(rows=3, seq_len=11), world
        ),
    }
    for name, call in cases.items():
        try:
            call()
        except UserError as error:
            found[name] = str(error)
    return found


def drawing_anew(model):
    """Have layers forget the random numbers of their forward."""
    peft = model.training.peft_model
    layers = decoder_layers(peft.get_base_model())
    for layer in layers:
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
    return model.training


def other_head(model):
    """Give our loss another scale than the family's."""
    head = model.training.head_loss.head
    model.training.head_loss.head = OutputHead(head.module, 0.9, None)
    return model.training


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n} processes")
def found(request, base):
    return run_in_group(checks, base, world_size=request.param)


def test_sound_model_passes_every_check_and_says_what_was_compared(found):
    """With dropout too, the family's and the adapter's, which the checks switch off."""
    for result in found:
        passed = {check.name: check for check in result["passed"]}
        assert len(passed) == 6
        assert all(check.passed for check in passed.values())
        assert any(
            "bytes equal checkpoint bytes" in name and f"{len(found)} processes" in name
            for name in passed
        )
        assert "logits equal those of the model family's own forward" in passed


def test_row_without_a_trained_token_is_refused(found):
    for result in found:
        assert result["empty row"] == (
            "a training row has no trained token. Check data.loss_on, and tokenize again."
        )


def test_family_whose_logits_are_not_the_heads_product_is_refused(found):
    """By a tenth: what scales are known in families is far more."""
    for result in found:
        message = result["other head"]
        assert message.startswith("LlamaForCausalLM is not supported: its logits differ by ")
        assert message.endswith(
            "so the loss would be another model's. Choose another model.source."
        )


def test_layers_that_draw_anew_in_backward_are_refused(found):
    """Attention's dropout, of a half."""
    for result in found:
        message = result["drawn anew"]
        assert message.startswith(
            "LlamaForCausalLM has other gradients where its layers are recomputed in backward: "
        )
        assert "Set train.activation_checkpointing to false" in message


def test_parameters_are_counted_once_though_tied(tmp_path):
    counts = {}
    for tied in (False, True):
        folder = tmp_path / str(tied)
        base = quantized(tiny_llama(folder / "original", tied=tied), folder / "nf4")
        counts[tied] = TrainingModel(adapted(base, r=3), [], 0).num_parameters()
    assert counts[False][0] == counts[True][0]
    assert counts[False][1] - counts[True][1] == 211 * 80


def test_adapter_targets_that_do_not_exist_are_refused_before_weights_are_read(base):
    (message,) = run_in_group(wrong_target, base, world_size=1)
    assert message.startswith(
        "lora.target_modules = 'w1': no linear layer of the model has this name"
    )


def test_tiles_that_a_model_cannot_have_are_refused_before_weights_are_read(base):
    (message,) = run_in_group(without_tiles, base, world_size=1)
    assert message == (
        "hardware.tile_tokens = 7: the engine computes no feed-forward of LlamaForCausalLM in one "
        "node. Set it to auto or 0."
    )


def without_tiles(world, base):
    config = RunConfig(
        train=TrainConfig(fused_layers=False), hardware=HardwareConfig(tile_tokens=7)
    )
    return refusal(built_model, base, config, make_plan(tile_tokens=7), world)


def wrong_target(world, base):
    config = RunConfig(lora=LoraSettings(target_modules=("w1",)))
    return refusal(built_model, base, config, make_plan(), world)


def test_cap_that_small_logits_do_not_reach_is_found(base):
    """Of 200, by logits of 6: the check makes larger ones."""
    training = adapted(base, r=2).eval()
    head = training.head_loss.head
    training.head_loss.head = OutputHead(head.module, 1.0, 200.0)
    with pytest.raises(UserError, match="its logits differ by"):
        check_family(training, random_store(rows=3, seq_len=11), ALONE)


def test_family_whose_own_forward_fails_is_refused_in_a_line(base, monkeypatch):
    """Step 3 does, with layers of a window and no window in its config."""
    training = adapted(base, r=2).eval()

    def fails(*_):
        raise ValueError("Could not find a `sliding_window`\nargument")

    monkeypatch.setattr(training, "family_logits", fails)
    with pytest.raises(UserError, match=r"own forward fails on text \(ValueError: Could not find"):
        check_family(training, random_store(rows=3, seq_len=11), ALONE)

"""What would fail after a training is refused when the model is described."""

import logging

import pytest

from tests.support.families import FAMILIES, by_kind, tiny_family
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.converted_reader import ConvertedReader
from workflow.lib.export import trial
from workflow.lib.export.trial import try_exports
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError


def tried(family, folder):
    tiny_family(family, folder)
    try_exports(Checkpoint(folder), describe_checkpoint(Checkpoint.open(folder)))


@pytest.mark.parametrize("family", by_kind(f for f in FAMILIES if not f.startswith("nemotron_h")))
def test_family_that_is_trained_is_tried_whole(family, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "workflow")
    tried(family, tmp_path)
    assert "trial: merging it" in caplog.text


def test_update_that_goes_whole_to_each_published_part_is_refused(tmp_path, monkeypatch):
    def whole_to_each(reader, name, tensor):
        return [(stored, tensor) for stored, _ in reader._stored[name]]

    monkeypatch.setattr(ConvertedReader, "parts", whole_to_each)
    with pytest.raises(UserError, match=r"'minimax_m3_vl': merging it fails \(.*_proj.* is not"):
        tried("minimax_m3_vl", tmp_path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("load_base", "loading its base in stock Transformers"),
        ("load_adapter", "loading its adapter in stock PEFT"),
        ("kept_logits", "its evaluation"),
    ],
)
def test_step_that_fails_is_named_before_the_training(name, step, tmp_path, monkeypatch):
    whole = getattr(trial, name)

    def fails(*given, **named):
        if name == "load_base" and given[0].folder.name == "model":
            return whole(*given, **named)
        raise IndexError("Dimension out of range")

    monkeypatch.setattr(trial, name, fails)
    with pytest.raises(UserError, match=rf"'llama': {step} fails \(IndexError: Dimension out"):
        tried("llama", tmp_path)


def test_narrow_model_that_does_not_run_refuses_nothing(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "workflow")
    monkeypatch.setattr(trial, "narrow_", lambda config, **_: setattr(config, "head_dim", 7))
    tried("llama", tmp_path)
    assert "exports are not tried before the training" in caplog.text

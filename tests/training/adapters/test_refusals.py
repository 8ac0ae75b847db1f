"""Modules that cannot be trained whole are refused."""

import pytest
import torch

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.export.adapter_files import merged_tensors
from workflow.lib.model.lora import unfreeze_
from workflow.lib.model.nf4_model import build_base_on_meta
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import UserError


def test_trained_module_that_the_model_has_not_is_refused(folder):
    adapter = {"base_model.model.embed_out.weight": torch.ones(1)}
    with (
        CheckpointReader(folder / "small" / "original") as source,
        Checkpoint(folder / "small" / "nf4").decoded() as nf4,
    ):
        tensors = merged_tensors(adapter, {}, original=source, nf4=nf4, onto="original")
        with pytest.raises(UserError, match=r"tensors for base_model.model.embed_out.weight, wh"):
            list(tensors)


def test_name_that_peft_would_find_elsewhere_too_is_refused(folder):
    model = build_base_on_meta(
        Checkpoint(folder / "small" / "nf4"), compute_dtype=torch.float32, attention="sdpa"
    )
    model.model.other_lm_head = torch.nn.Identity()
    settings = LoraSettings(modules_to_save=("lm_head",))
    with pytest.raises(UserError, match=r"'lm_head': model\.other_lm_head ends so too"):
        unfreeze_(model, settings)

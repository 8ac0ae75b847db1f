"""A model that is read layer by layer has the loss of the whole model: a mixture, from a tensor for
each expert, and the decoder of a multimodal model, from names of its own."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import tiny_family
from tests.support.mixtures import tiny_mixture
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.scores.streamed_model import StreamedModel


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma3"])
def test_streamed_model_has_the_loss_of_the_whole(tmp_path, family):
    folder = (tiny_family if family == "gemma3" else tiny_mixture)(family, tmp_path)
    ids = np.random.default_rng(0).integers(1, 40, size=31, dtype=np.uint32)
    mask = np.arange(31) % 3 > 0
    streamed = StreamedModel(Checkpoint(folder), device=torch.device("cpu"), dtype=torch.float32)
    ((loss, count, _),) = streamed.losses([(ids, mask)])
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    row = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        shown = model(row[None]).logits[0, :-1].log_softmax(-1)
    each = -shown.gather(1, row[1:, None])[:, 0]
    assert count == mask.sum()
    assert loss == pytest.approx(float(each[torch.from_numpy(mask[1:])].sum()), rel=1e-4)

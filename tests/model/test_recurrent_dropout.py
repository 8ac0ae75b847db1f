"""Dropout in recurrent layers, whose linears are given documents in place of rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.families import tiny_family
from tests.support.models import adapted, quantized, random_store
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.batches import stored_batch


def test_rows_of_documents_meet_the_same_dropout_together_and_alone(tmp_path):
    base = quantized(tiny_family("lfm2", tmp_path / "original"), tmp_path / "nf4")
    training = adapted(base, r=3, dropout=0.4).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in trainable_parameters(training).values():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    store = random_store(rows=3, seq_len=29)
    model: Any = training.peft_model
    store.input_ids[:] %= model.get_base_model().config.vocab_size
    assert training.recurrent_layers

    def loss(*rows, step=1):
        keys = torch.tensor(row_keys(0, step=step, rows=rows))
        batch = replace(stored_batch(store, np.array(rows)), row_keys=keys)
        return float(training(batch).detach())

    together = loss(0, 1, 2)
    assert together == pytest.approx(loss(0) + loss(1) + loss(2), rel=1e-5)
    assert together != pytest.approx(loss(0, 1, 2, step=2), rel=1e-5)

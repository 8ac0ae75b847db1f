"""What 4 bits cost by weight: beside gradients of the whole model, and which weights it prefers."""

from copy import copy

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn
from transformers import AutoConfig

from tests.quantization.test_calibrated_base import LENGTHS, ROUNDING, store
from tests.quantization.test_layer_stream import folder_of
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.quantization import sensitivity
from workflow.lib.quantization.layer_stream import LayerStream
from workflow.lib.quantization.nf4_checkpoint import BaseWeights
from workflow.lib.quantization.sensitivity import (
    LEAST_COST,
    TRAINING,
    measured_costs,
    other_texts,
    own_texts,
    predicted_tokens,
)
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.progress import Progress

CPU = torch.device("cpu")
SETTINGS = QuantizeConfig(keep="auto", double_quant=False)
DOCUMENTS = [(np.arange(3, 20, dtype=np.uint32), np.arange(17) > 4)]


def measured(folder):
    model = Checkpoint(folder)
    weights = BaseWeights.of(model.build(torch.bfloat16), SETTINGS)
    paths = {*weights.linears, *weights.stacks}
    with model.weights() as reader:
        stream = LayerStream(model, reader, device=CPU, dtype=torch.float32)
        texts = own_texts(SETTINGS, store(), model, device=CPU)
        texts |= other_texts(DOCUMENTS, ["prose"], device=CPU)
        return paths, measured_costs(stream, texts, paths, SETTINGS)


def change(weight):
    """What bitsandbytes' NF4 changes of a weight (out, in), in a row: on CPUs it decodes rows of
    incomplete blocks wrongly."""
    packed, state = quantize_4bit(weight.reshape(1, -1), blocksize=64, quant_type="nf4")
    return dequantize_4bit(packed, state).reshape(weight.shape) - weight


def whole_model(folder):
    attention = Checkpoint(folder).attention_needs.stock
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )


def weight_at(model, path):
    """The weight of a linear, or a stack of experts, and whether it is stored (in, out)."""
    module, _, name = path.rpartition(".")
    parent = model.get_submodule(module)
    part = getattr(parent, name)
    return (part, parent.is_transposed) if isinstance(part, nn.Parameter) else (part.weight, False)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_costs_are_those_of_the_whole_models_gradients(tmp_path, name):
    folder = folder_of(name, tmp_path / "original")
    paths, costs = measured(folder)
    model = whole_model(folder).eval()
    ((ids, mask),) = DOCUMENTS
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    targets = torch.from_numpy(mask).nonzero().flatten()
    loss = nn.functional.cross_entropy(logits[targets - 1], tokens[targets])
    (len(targets) * loss).backward()
    assert costs["prose"].keys() == paths
    squares = {}
    for path in paths:
        weight, turned = weight_at(model, path)
        stacked = (x.reshape(-1, *x.shape[-2:]) for x in (weight.detach(), weight.grad))
        with torch.no_grad():
            for part, grad in zip(*stacked, strict=True):
                changed = change(part.T).T if turned else change(part)
                squares[path] = squares.get(path, 0.0) + float((grad * changed).square().sum())
                part += changed
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    rounded = nn.functional.cross_entropy(logits[targets - 1], tokens[targets])
    cost, whole = float((rounded - loss).detach()), sum(costs["prose"].values())
    assert whole == pytest.approx(max(LEAST_COST, cost), abs=ROUNDING * float(loss.detach()))
    for path, square in squares.items():
        share = square / sum(squares.values())
        assert costs["prose"][path] / whole == pytest.approx(share, rel=ROUNDING), path


def test_each_row_moves_the_progress_as_far_as_the_total(tmp_path, monkeypatch):
    """And backward is as much work as is said of it."""
    moves, works = [], []

    class Counted(Progress):
        def __init__(self, what, *, total, unit, total_work):
            super().__init__(what, total=total, unit=unit, total_work=total_work)
            moves.append(-total)
            works.append(-total_work)

        def add(self, count, *, work=1.0):
            moves.append(count)
            works.append(work)

    monkeypatch.setattr(sensitivity, "Progress", Counted)
    measured(folder_of("llama", tmp_path / "original"))
    assert sum(moves) == sum(works) == 0
    assert set(moves[1:]) == {1}


def test_rows_are_those_of_training_that_do_not_count_padding_and_other_kinds_beside_them(tmp_path):
    folder = folder_of("llama", tmp_path / "original")
    texts = own_texts(SETTINGS, store(), Checkpoint(folder), device=CPU)
    texts |= other_texts(DOCUMENTS, ["prose"], device=CPU)
    trained = sum(int((np.concatenate([np.arange(n) for n in row]) > 0).sum()) for row in LENGTHS)
    assert predicted_tokens(texts) == {TRAINING: trained, "prose": 12}


def test_tokens_without_training_rows_are_told(tmp_path):
    empty = copy(store())
    empty.num_rows = 0
    with pytest.raises(UserError, match=r"quantize\.keep = 'auto': .*rows.*data\.train"):
        own_texts(SETTINGS, empty, Checkpoint(tmp_path), device=CPU)

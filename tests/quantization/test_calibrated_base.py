"""A calibrated base of every kind of family: what it records of whole models, and how it goes on
after a kill."""

from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from tests.quantization.test_layer_stream import folder_of
from tests.support.families import FAMILIES, VOCAB, by_kind
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized, stock_base, tiny_llama
from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.quantization import calibrated_base
from workflow.lib.quantization.calibrated_base import (
    BATCH_TOKENS,
    CalibrationInputs,
    calibration_batches,
    check_gpu_memory,
    layer_bytes,
    measured_batches,
    rows_at_once,
    write_calibrated,
)
from workflow.lib.quantization.calibration import Calibration
from workflow.lib.quantization.nf4_checkpoint import BaseWeights, base_config, copy_companions
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_json

CPU = torch.device("cpu")
SETTINGS = QuantizeConfig(method="calibrated", calibration_tokens=256)
LENGTHS = [[9, 6, 8], [23], [3, 19, 1], [2, 2, 17, 2]]
# Keys of earlier layers and a linear beside them; states of routers; recurrent layers beside
# experts; tokens that an indexer chose.
KINDS = ("gemma4_text", "zaya", "jamba", "glm_moe_dsa")
# What is summed in another order: recorded losses in float32, of a few documents.
ROUNDING = 2e-4


@cache
def store():
    draw = np.random.default_rng(5)
    positions = np.array([np.concatenate([np.arange(n) for n in row]) for row in LENGTHS])
    offsets = np.array([0, 13, 30])
    mask = np.ones(30, bool)
    mask[offsets[:-1]] = False
    ids = draw.integers(3, VOCAB, size=positions.shape, dtype=np.uint32)
    heldout = (draw.integers(3, VOCAB, size=30, dtype=np.uint32), mask, offsets)
    arrays = token_arrays(ids, positions > 0, positions.astype(np.int32), heldout=heldout)
    manifest = {"seq_len": 23, "vocab_size": VOCAB, "pad_token_id": 0}
    return TokenStore(manifest=manifest, arrays=arrays)


def test_ends_of_turns_calibrate_where_padding_is_the_same_token():
    ids = np.full((1, 9), 7, dtype=np.uint32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1]], dtype=np.int32)
    mask = (positions > 0) & (np.arange(9) < 7)
    documents = (ids[0], mask[0], np.array([0, 9]))
    manifest = {"seq_len": 9, "vocab_size": VOCAB, "pad_token_id": 7}
    arrays = token_arrays(ids, mask, positions, heldout=documents)
    rows = calibration_batches(
        QuantizeConfig(method="calibrated"), TokenStore(manifest=manifest, arrays=arrays), None,
        device=CPU,
    )  # fmt: skip
    assert [batch.counted.tolist() for batch in rows] == [[[True] * 7 + [False] * 2]]


def calibrate(original, target, settings=SETTINGS):
    model = Checkpoint(original).build(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    with Checkpoint(original).weights() as reader:
        weights = BaseWeights.of(model, settings)
        inputs = CalibrationInputs(
            Checkpoint(original), reader, store(), weights, CPU, torch.float32
        )
        _, facts = write_calibrated(target, inputs, settings, fingerprint="x")
    copy_companions(original, target)
    config = Checkpoint(original).plain_config
    write_json(target / "config.json", base_config(config, settings, weights))
    return facts.heldout


@torch.no_grad()
def losses(model):
    """Summed loss of each held-out document, by the whole model."""
    totals = []
    for ids, mask in store().heldout_documents():
        tokens = torch.from_numpy(np.array(ids, dtype=np.int64))
        logits = model.eval()(input_ids=tokens[None], use_cache=False).logits[0]
        targets = torch.from_numpy(np.array(mask)).nonzero().flatten()
        log_p = logits.float().log_softmax(-1)
        totals.append(-float(log_p[targets - 1, tokens[targets]].sum()))
    return totals


@pytest.mark.parametrize("name", by_kind(dict.fromkeys((*KINDS, *FAMILIES)), KINDS))
def test_recorded_losses_are_those_of_the_whole_models_after_a_kill(tmp_path, monkeypatch, name):
    original, target = folder_of(name, tmp_path / "original"), tmp_path / "calibrated"
    kill_before_last_layer(original, target, monkeypatch)
    recorded = calibrate(original, target)
    attention = Checkpoint(original).attention_needs.stock
    whole = auto_class(AutoConfig.from_pretrained(original)).from_pretrained(
        original, dtype=torch.float32, attn_implementation=attention
    )
    assert recorded.original == pytest.approx(losses(whole), rel=ROUNDING)
    plain = quantized(original, tmp_path / "absmax")
    for base, found in ((target, recorded.calibrated), (plain, recorded.absmax)):
        model = stock_base(base, attention=attention)
        assert found == pytest.approx(losses(model), rel=ROUNDING)


@pytest.mark.parametrize(
    ("make", "keep", "left"),
    [
        (tiny_llama, ("down_proj", r"layers\.1"), 12),
        (partial(tiny_mixture, "qwen3_moe"), ("experts.down_proj", r"layers\.1.mlp"), 9),
    ],
)
def test_kept_weights_stay_and_the_others_are_calibrated_after_them(tmp_path, make, keep, left):
    original = make(tmp_path / "original", vocab_size=VOCAB)
    settings = SETTINGS.model_copy(update={"keep": keep})
    recorded = calibrate(original, tmp_path / "base", settings)
    base = Checkpoint(tmp_path / "base")
    model = load_base(base, device=CPU, compute_dtype=torch.float32, attention="eager")
    assert recorded.calibrated == pytest.approx(losses(model), rel=ROUNDING)
    with base.stored() as stored, Checkpoint(original).weights() as source:
        kept = [name for name in source.names() if kept_linears(keep, [name])]
        assert all(torch.equal(stored.tensor(name), source.tensor(name)) for name in kept)
        codes = [name for name in stored.names() if name.endswith("bitsandbytes__nf4")]
        assert len(codes) == left
        assert not kept_linears(keep, codes)


def kill_before_last_layer(original, target, monkeypatch):
    whole = Calibration.quantize

    def killed(self, number, hidden):
        if number + 1 == len(self._stream.layers):
            raise KeyboardInterrupt
        return whole(self, number, hidden)

    with monkeypatch.context() as patched:
        patched.setattr(calibrated_base, "STATE_S", -1.0)  # after every layer
        patched.setattr(Calibration, "quantize", killed)
        with pytest.raises(KeyboardInterrupt):
            calibrate(original, target)


@pytest.mark.parametrize("name", KINDS[:2])
def test_calibration_that_was_killed_goes_on_to_the_same_bytes(tmp_path, monkeypatch, name):
    original = folder_of(name, tmp_path / "original")
    calibrate(original, tmp_path / "whole")
    kill_before_last_layer(original, tmp_path / "resumed", monkeypatch)
    finished = len(list((tmp_path / "resumed").glob("layer-*.safetensors")))
    assert finished == Checkpoint(original).build(torch.bfloat16).config.num_hidden_layers - 1
    calibrate(original, tmp_path / "resumed")
    for path in (tmp_path / "whole").glob("*.safetensors"):
        resumed = load_file(tmp_path / "resumed" / path.name)
        for key, tensor in load_file(path).items():
            assert torch.equal(resumed[key], tensor), key


GPU = torch.device("cuda")


def layer():
    with torch.device("meta"):
        return nn.ModuleDict({"up": nn.Linear(96, 160), "down": nn.Linear(160, 96, bias=False)})


def test_bytes_of_a_small_layer_by_hand():
    weights = 4 * (96 * 160 * 2 + 160)
    expected = 4 * (3 * 160**2 + 7 * 96 * 160) + 5 * weights // 2 + 3 * 4 * BATCH_TOKENS * 160
    assert layer_bytes(layer()) == expected


def test_scores_count_where_they_are_more_than_the_matrices():
    """Attention has ended before a linear is rounded."""
    matrices = 4 * (3 * 160**2 + 7 * 96 * 160)
    assert layer_bytes(layer(), scores=matrices // 8) == layer_bytes(layer())
    assert layer_bytes(layer(), scores=10**6) == layer_bytes(layer()) - matrices + 8 * 10**6


@pytest.mark.parametrize("enough", [True, False])
def test_too_little_memory_is_told_with_both_numbers(enough, monkeypatch):
    free = layer_bytes(layer()) - (0 if enough else 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    if enough:
        check_gpu_memory([layer()], GPU)
        return
    with pytest.raises(UserError, match=r"quantize.method = 'calibrated'.*0.0 GiB.*absmax"):
        check_gpu_memory([layer()], GPU)


def test_experts_of_a_layer_are_counted_once_and_their_originals_on_the_host(tmp_path):
    model = Checkpoint(tiny_mixture("qwen3_moe", tmp_path)).build(torch.bfloat16)
    layer = model.model.layers[0]
    in_stacks = 2 * 11 * (96 * 64 + 64 * 48)
    weights = sum(p.nbytes for p in layer.parameters())
    largest = 96 * 64  # of an expert; 64 x 64 are those of attention
    expected = weights + 3 * (weights - in_stacks) // 2
    expected += 4 * (3 * 64**2 + 7 * largest) + 3 * 4 * BATCH_TOKENS * 64
    expected += 2 * 10 * BATCH_TOKENS * (96 + 64 + 64 + 48) + 4 * 5 * (11 * largest) // 64
    assert layer_bytes(layer) == expected


@pytest.mark.parametrize(
    ("width", "eager_heads", "rows"),
    [
        (2048, 0, 4),
        (512, 0, 16),
        (10_000, 0, 1),  # longer than what goes through at once: a row all the same
        (2048, 32, 2),
        (2048, 64, 1),
        (4096, 64, 1),  # more scores than wanted: a row all the same
        (512, 8, 16),
    ],
)
def test_rows_go_through_together_by_their_tokens_and_scores(width, eager_heads, rows):
    assert rows_at_once(width, eager_heads=eager_heads) == rows


@pytest.mark.parametrize(("eager_heads", "longest"), [(0, 90), (4, 50)])
def test_measured_documents_are_cut_where_all_scores_would_be_too_many(
    eager_heads, longest, monkeypatch
):
    monkeypatch.setattr(calibrated_base, "SCORES", 4 * 50**2)
    documents = [(np.arange(length), np.arange(length) > 3) for length in (90, 7, 51)]
    store = SimpleNamespace(heldout_documents=lambda: documents)
    batches = measured_batches(store, device=CPU, eager_heads=eager_heads)
    assert [batch.input_ids.shape for batch in batches] == [
        (1, min(longest, length)) for length in (90, 7, 51)
    ]
    assert all(batch.counted is not None for batch in batches)

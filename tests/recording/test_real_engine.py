"""What is recorded on fake tensors against what the engine allocates on the CPU as it trains a tiny
model."""

import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.models import adapted, quantized, tiny_gemma2, tiny_llama
from tests.support.preflight_examples import SEVEN, setup
from workflow.lib.model.architecture.model_shape import described_config
from workflow.lib.model.fusion.fuse_layers import fuse_norms_between_
from workflow.lib.model.recomputation import checkpoint_activations_
from workflow.lib.model.training_module import loss_in
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.scores.store import Scores
from workflow.lib.settings.objectives import (
    NEEDS,
    PAIRED,
    DistillConfig,
    GrpoConfig,
    PreferencesConfig,
)
from workflow.lib.training.batches import make_batch, with_examples, with_scores
from workflow.lib.training.gradients import LossSum
from workflow.lib.training.micro_batch_graphs import forward_backward

ROWS, SEQ_LEN, TILE = 2, 64, 16
ATTENTION_ONLY = SEVEN[:4]


class Recorder(TorchDispatchMode):
    """The bytes of all storages that operations make within the block, and their peak.

    Not those of int64 and bool, of which a CPU makes the masks of dropout, and a GPU does not."""

    def __init__(self, known):
        super().__init__()
        self._there = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in (torch.int64, torch.bool):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage):
        if storage._cdata not in self._there:
            self._there.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, key, num_bytes):
        self._there.discard(key)
        self.now -= num_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return made(tmp_path_factory.mktemp("traced"), vocab_size=101)


def made(folder, *, vocab_size):
    """Return a model and its NF4 base."""
    source = tiny_llama(
        folder / "original", hidden_size=128, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=vocab_size,
    )  # fmt: skip
    return source, quantized(source, folder / "nf4")


def random_batch():
    ids = np.random.default_rng(0).integers(0, 101, size=(ROWS, SEQ_LEN))
    places = np.tile(np.arange(SEQ_LEN), (ROWS, 1))
    batch = make_batch(ids, places, places > 0, device=torch.device("cpu"))
    return replace(batch, row_keys=torch.arange(ROWS))


TOP_K = 8


def batch_for(objective):
    """Return rows with what an objective reads besides tokens: of two documents where it takes
    examples of two."""
    needs, batch = NEEDS[objective], random_batch()
    if needs.examples == "groups":
        ids, places = (x.numpy() for x in (batch.input_ids, batch.position_ids))
        values = np.ones((ROWS, SEQ_LEN), dtype=np.float32)
        by_token = {"advantages": values, "sampled_log_probs": -values}
        made = make_batch(ids, places, places > 0, by_token=by_token, device=torch.device("cpu"))
        batch = replace(made, row_keys=batch.row_keys, step_sizes=torch.ones(2))
    if needs.examples in PAIRED:
        ids, half = batch.input_ids.numpy(), SEQ_LEN // 2
        places = np.tile(np.arange(half), (ROWS, 2))
        trained = np.tile(np.arange(SEQ_LEN) > 0, (ROWS, 1))  # about as many as in the recording
        made = make_batch(ids, places, trained, device=torch.device("cpu"))
        keys = batch.row_keys
        good = np.ones((ROWS, SEQ_LEN), dtype=np.bool_) if needs.examples == "rated" else None
        batch = replace(with_examples(made, good), row_keys=keys, step_sizes=torch.ones(3))
    tokens = len(batch.targets)
    log_probs = np.full(tokens, -1.0, dtype=np.float32)
    if needs.scores_of in ("preferences.reference", "grpo.kl_reference"):
        return with_scores(batch, [Scores(log_probs)])
    if needs.scores_of == "distill.teacher":
        ids = np.tile(np.arange(TOP_K, dtype=np.uint32), (tokens, 1))
        top = np.full((tokens, TOP_K), -3.0, dtype=np.float32)
        return with_scores(batch, [Scores(log_probs, ids, top, log_probs)])
    return batch


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A vocabulary that outgrows all else."""
    return made(tmp_path_factory.mktemp("wide"), vocab_size=9001)


def adapted_in_bf16(base, *, every, **lora):
    """Return the training module of an NF4 folder, every so many layers recomputed (0: none)."""
    training = adapted(base, attention="eager", dtype=torch.bfloat16, **{"r": 4} | lora)
    if every:
        checkpoint_activations_(training.peft_model.get_base_model(), range(0, 9, every))
    return training.train()


def allocated(base, *, targets, dora, every, modules=(), batches=1, dropout=0.0, objective="sft"):
    """The peaks of as many micro-batches as 1, 2 and so on to `batches`, on the CPU in bf16, above
    what lies there before, bytes."""
    training = adapted_in_bf16(
        base, every=every, target_modules=targets, use_dora=dora, modules_to_save=modules,
        dropout=dropout,
    )  # fmt: skip
    training.objective = objective_of(objective, PreferencesConfig(), DistillConfig(), GrpoConfig())
    batch, peaks = batch_for(objective), []
    known = [*training.parameters(), *training.buffers()]
    with Recorder(known) as seen, training.adapters.unchanged():
        for _ in range(batches):
            loss = training(batch)
            loss_in(loss).backward()
            del loss
            peaks.append(seen.peak)
    return peaks


def test_nothing_of_a_micro_batch_is_held_after_its_backward(folders):
    """With recomputation its graph would hold hidden states until the next one has its loss."""
    _, base = folders
    training = adapted_in_bf16(base, every=1)
    batches, left = [random_batch(), random_batch()], []

    def taken():
        for batch in batches:
            yield batch
            gradients = [p.grad for p in training.parameters() if p.grad is not None]
            left.append(seen.now - sum(grad.untyped_storage().nbytes() for grad in gradients))

    with Recorder([*training.parameters(), *training.buffers()]) as seen:
        run = partial(forward_backward, training)
        LossSum(run, divisor=9, factor=1.0, device=torch.device("cpu")).add(taken())
    hidden_size = training.peft_model.get_base_model().config.hidden_size
    assert max(left) < ROWS * SEQ_LEN * hidden_size  # half a hidden state in bf16


def recorded(process, source, plan):
    return process.record(described_config(source), plan, checked=False, whole=True)


def peak(tape):
    """The same of a recording's second step, without rounding. What cuBLAS borrows is left out."""
    first_step = tape.events.index("optimizer_step")
    begin = tape.events.index("look_up_embedding", first_step)
    now = largest = 0
    for event in tape.events[begin : tape.events.index("optimizer_step", begin)]:
        if isinstance(event, int) and tape.terms[max(event, ~event)] != "cublas_workspace":
            now += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
            largest = max(largest, now)
    return largest


def chosen(**changes):
    fixed = {"processes": 1, "micro_batch_size": ROWS, "seq_len": SEQ_LEN, "rank": 4}
    return setup(**{**fixed, "attention": "eager", **changes})


@pytest.mark.parametrize(
    "lever",
    [{"every": 1}, {"every": 0}, {"every": 2}, {"every": 1, "targets": ATTENTION_ONLY},
     {"every": 0, "dora": True}, {"every": 1, "dora": True}, {"every": 0, "dropout": 0.1},
     {"every": 1, "dropout": 0.1}, {"every": 0, "dora": True, "dropout": 0.1},
     {"every": 1, "dora": True, "dropout": 0.1}],
    ids=str,
)  # fmt: skip
def test_peak_above_the_weights_is_that_of_the_engine(process, folders, lever):
    """Fused layers are left out: they compute in place, by kernels that a CPU has not."""
    source, base = folders
    wanted = {"targets": SEVEN, "dora": False} | lever
    plan = chosen(
        targets=wanted["targets"], dora=wanted["dora"], activation_checkpointing=wanted["every"],
        dropout="dropout" in wanted,
    )  # fmt: skip
    found = peak(recorded(process, source, plan))
    assert [found] == pytest.approx(allocated(base, **wanted), rel=0.02)


def tiled_peak(base, *, tokens):
    """As `allocated`, of fused layers in tiles of so many tokens (0: whole rows)."""
    training = adapted_in_bf16(base, every=0, target_modules=SEVEN, fused_layers=True)
    if tokens:
        fuse_norms_between_(training.peft_model.get_base_model().get_decoder())
        training.tile_(tokens)
    batch = random_batch()
    known = [*training.parameters(), *training.buffers()]
    with Recorder(known) as seen, training.adapters.unchanged():
        training(batch).backward()
    return seen.peak


def test_tiles_save_what_they_save_on_the_engine(process, folders):
    """Without recomputation the peak is where fused layers compute nothing in place."""
    source, base = folders
    options = {"fused_layers": True, "activation_checkpointing": False}
    plans = [chosen(tile_tokens=tokens, **options) for tokens in (0, TILE)]
    recorded_peaks = [peak(recorded(process, source, plan)) for plan in plans]
    measured = [tiled_peak(base, tokens=tokens) for tokens in (0, TILE)]
    assert recorded_peaks == pytest.approx(measured, rel=0.02)
    assert recorded_peaks[1] < 0.8 * recorded_peaks[0]


@pytest.fixture(scope="module", params=[None, 50.0], ids=["plain", "soft-capped"])
def gemma(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    source = tiny_gemma2(folder / "original", attn_logit_softcapping=request.param)
    return source, quantized(source, folder / "nf4")


@pytest.mark.parametrize("every", [0, 1, 2])
def test_peak_of_a_model_with_soft_capped_scores_is_that_of_the_engine(process, gemma, every):
    source, base = gemma
    found = peak(recorded(process, source, chosen(activation_checkpointing=every)))
    measured = allocated(base, targets=SEVEN, dora=False, every=every)
    assert [found] == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    "modules", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens")], ids=str
)
def test_peak_with_trained_modules_is_that_of_the_engine(process, wide, modules):
    """Of one micro-batch, and of two."""
    source, base = wide
    trained = {"trains_head": "lm_head" in modules, "trains_embedding": "embed_tokens" in modules}
    plans = [chosen(accumulation_steps=count, **trained) for count in (1, 2)]
    found = [peak(recorded(process, source, plan)) for plan in plans]
    measured = allocated(base, targets=SEVEN, dora=False, every=1, modules=modules, batches=2)
    assert found == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("modules", [(), ("lm_head",)], ids=str)
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "distill", "grpo"])
def test_peak_of_an_objective_is_that_of_the_engine(process, wide, objective, modules):
    source, base = wide
    plan = chosen(
        trains_head="lm_head" in modules, objective=objective,
        documents_per_row=1 if objective in ("distill", "grpo") else 2,
        top_k=TOP_K if objective == "distill" else 0,
    )  # fmt: skip
    found = peak(recorded(process, source, plan))
    measured = allocated(
        base, targets=SEVEN, dora=False, every=1, modules=modules, objective=objective
    )
    assert [found] == pytest.approx(measured, rel=0.02)

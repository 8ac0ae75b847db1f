"""The traced allocations against those of the engine itself, recorded on the CPU as it trains a tiny model."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import quantized, tiny_llama
from tests.preflight_examples import SEVEN, setup
from workflow.lib.batches import MicroBatch, make_batch
from workflow.lib.config import LoraSettings
from workflow.lib.lora import init_adapters_, inject_adapters
from workflow.lib.loss import CausalLMForTraining
from workflow.lib.memory_terms import Setup
from workflow.lib.model import build_nf4_on_meta, load_weights_, materialize_
from workflow.lib.parallel import checkpoint_activations_
from workflow.lib.shapes import ModelShape, read_shape
from workflow.lib.step_trace import step_trace
from workflow.lib.training import backward

ROWS, SEQ_LEN = 2, 64
ATTENTION_ONLY = SEVEN[:4]


class Recorder(TorchDispatchMode):
    """The bytes of all storages that operations make within the block, and their peak."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._there = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._there:
            self._there.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._there.discard(key)
        self.now -= num_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(tmp_path_factory.mktemp("traced"), vocab_size=101)


def made(folder: Path, *, vocab_size: int) -> tuple[Path, Path]:
    """Return a model and its NF4 base."""
    source = tiny_llama(
        folder / "original", hidden_size=128, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=vocab_size,
    )  # fmt: skip
    return source, quantized(source, folder / "nf4")


def random_batch() -> MicroBatch:
    ids = np.random.default_rng(0).integers(0, 101, size=(ROWS, SEQ_LEN))
    places = np.tile(np.arange(SEQ_LEN), (ROWS, 1))
    return make_batch(ids, places, places > 0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A vocabulary that outgrows all else."""
    return made(tmp_path_factory.mktemp("wide"), vocab_size=9001)


def recorded(
    base: Path, *, targets: tuple[str, ...], dora: bool, every: int, modules: tuple[str, ...] = (), batches: int = 1
) -> int:  # fmt: skip
    """The peak of so many micro-batches on the CPU in bf16 above what lies there before, bytes."""
    model = build_nf4_on_meta(base, compute_dtype=torch.bfloat16, attention="eager")
    lora = LoraSettings(r=4, target_modules=targets, use_dora=dora, modules_to_save=modules)
    training = CausalLMForTraining(inject_adapters(model, lora))
    if every:
        checkpoint_activations_(model, every=every)
    materialize_(training, transformers_model=model, device=torch.device("cpu"))
    load_weights_(model, base)
    init_adapters_(training, seed=0, base=base)
    training.train()
    batch = random_batch()
    with Recorder([*training.parameters(), *training.buffers()]) as seen:
        for _ in range(batches):
            loss = training(batch.input_ids, batch.position_ids, batch.positions, batch.targets)
            loss.backward()
            del loss
    return seen.peak


def test_nothing_of_a_micro_batch_is_held_after_its_backward(folders: tuple[Path, Path]) -> None:
    """With recomputation its graph would hold hidden states until the next one has its loss."""
    _, base = folders
    model = build_nf4_on_meta(base, compute_dtype=torch.bfloat16, attention="eager")
    training = CausalLMForTraining(inject_adapters(model, LoraSettings(r=4)))
    checkpoint_activations_(model, every=1)
    materialize_(training, transformers_model=model, device=torch.device("cpu"))
    load_weights_(model, base)
    init_adapters_(training, seed=0, base=base)
    batches, left = [random_batch(), random_batch()], []

    def taken() -> Iterator[MicroBatch]:
        for batch in batches:
            yield batch
            gradients = [p.grad for p in training.parameters() if p.grad is not None]
            left.append(seen.now - sum(grad.untyped_storage().nbytes() for grad in gradients))

    with Recorder([*training.parameters(), *training.buffers()]) as seen:
        backward(training, taken(), trained_tokens=9, factor=1.0, device=torch.device("cpu"))
    assert max(left) < ROWS * SEQ_LEN * model.config.hidden_size  # half a hidden state in bf16


def traced(shape: ModelShape, chosen: Setup) -> int:
    """The same by the trace, without rounding; gradients are made in it too."""
    tape = step_trace(shape, chosen, checked=False)
    before = tape.events.index("look_up_embedding")
    now = peak = 0
    for event in tape.events[before : tape.events.index("optimizer_step")]:
        if isinstance(event, int):
            now += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    "lever",
    [{"every": 1}, {"every": 0}, {"every": 2}, {"every": 1, "targets": ATTENTION_ONLY},
     {"every": 0, "dora": True}],
    ids=str,
)  # fmt: skip
def test_peak_above_the_weights_is_that_of_the_engine(
    folders: tuple[Path, Path], lever: dict[str, Any]
) -> None:
    """Fused layers are left out: they compute in place, by kernels that a CPU has not."""
    source, base = folders
    wanted = {"targets": SEVEN, "dora": False} | lever
    chosen = setup(
        processes=1, micro_batch_size=ROWS, seq_len=SEQ_LEN, rank=4, attention="eager", fixed={},
        targets=wanted["targets"], dora=wanted["dora"], activation_checkpointing=wanted["every"],
    )  # fmt: skip
    found = traced(read_shape(source), chosen)
    assert found == pytest.approx(recorded(base, **wanted), rel=0.02)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    "modules", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens")], ids=str
)
def test_peak_with_trained_modules_is_that_of_the_engine(
    wide: tuple[Path, Path], modules: tuple[str, ...], batches: int
) -> None:
    source, base = wide
    chosen = setup(
        processes=1, micro_batch_size=ROWS, seq_len=SEQ_LEN, rank=4, attention="eager", fixed={},
        targets=SEVEN, activation_checkpointing=True, accumulates=batches > 1,
        trains_head="lm_head" in modules, trains_embedding="embed_tokens" in modules,
    )  # fmt: skip
    found = traced(read_shape(source), chosen)
    measured = recorded(base, targets=SEVEN, dora=False, every=1, modules=modules, batches=batches)
    assert found == pytest.approx(measured, rel=0.02)

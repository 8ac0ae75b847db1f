"""The tape of a model whose layers are repeated against that of the model with all its layers."""

import logging
from collections import Counter

import pytest

from tests.support.distributed import run_distributed
from tests.support.preflight_examples import llama_config, num_calls, setup
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.preflight.plan_search import NotRecordedError
from workflow.lib.recording.engine_run import record
from workflow.lib.recording.layer_tape import LayerTape
from workflow.lib.recording.repeat_layers import NotRepeatableError, repeated, representatives

LLAMA = llama_config(256, 640, 12, 4, 2, 1000)
# Windows by turns, soft-capped scores, and a head that is tied to the embedding.
GEMMA = LLAMA | {
    "model_type": "gemma2",
    "head_dim": 64,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
MOST_OF_NORMS = 4096  # bytes of a tensor with a norm of every adapter's gradient
SHORTER_NORMS = 512  # bytes of the allocator: the norms of fewer adapters' gradients
PAGE = 2 * 2**20  # of the allocator, for small tensors


def large(tape):
    """How many tensors of each size there are, the norms of all gradients left out."""
    return Counter(size for size in tape.sizes if size > MOST_OF_NORMS)


@pytest.mark.parametrize(
    ("config", "layers", "levers", "window_bytes"),
    [
        (LLAMA, 9, {"reshard_after_forward": False, "accumulation_steps": 2, "processes": 4,
                    "replicas": 2, "trains_head": True, "trains_embedding": True}, None),
        (LLAMA, 12, {"processes": 1, "activation_checkpointing": 2, "offload_layers": 5,
                     "dropout": 0.05, "dora": True}, None),
        (LLAMA, 11, {"offload_activations": True, "optimizer": "adamw_8bit"}, 131072),
        (GEMMA, 10, {"processes": 1, "activation_checkpointing": False, "attention": "flex"}, None),
        (LLAMA, 12, {"activation_checkpointing": False, "keep_decoded": 5, "cuda_graphs": True,
                     "matmul_dtype": "float8"}, None),
    ],
    ids=["kept gathered", "some recomputed, some on the host", "offloaded", "windows by turns",
         "some decoded"],
)  # fmt: skip
def test_repeated_layers_ask_for_what_all_layers_ask(process, config, layers, levers, window_bytes):
    chosen = setup(seq_len=128, fused_layers=True, offload_window_bytes=window_bytes, **levers)
    config = config | {"num_hidden_layers": layers}
    some, every = (process.record(config, chosen, whole=whole) for whole in (False, True))
    assert large(some) == large(every)
    of_some, of_all = replay(some), replay(every)
    assert of_some.peaks.phase_bytes == pytest.approx(of_all.peaks.phase_bytes, abs=SHORTER_NORMS)
    assert of_some.peaks.allocated_bytes == pytest.approx(
        of_all.peaks.allocated_bytes, abs=SHORTER_NORMS
    )
    assert of_some.reserved_bytes == pytest.approx(of_all.reserved_bytes, abs=PAGE)
    assert of_some.peaks.peak_phase == of_all.peaks.peak_phase
    # An update of tensors of several layers counts for each alike, though some are larger.
    assert totals(some.work) == pytest.approx(totals(every.work), rel=0.05)


def totals(work):
    """Return FLOP, bytes and calls of each phase and kind."""
    return {
        f"{phase} {kind} {name}": number
        for phase, amounts in work.phases.items()
        for kind, amount in amounts.items()
        for name, number in amount._asdict().items()
    }


def refusals(cases):
    """Return with which levers layers were refused that did not stand for all, and why."""
    said = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: said.append(f"{levers}: {record.getMessage()}")
    logging.getLogger("workflow").addHandler(handler)
    logging.getLogger("workflow").setLevel(logging.DEBUG)
    for levers in cases:
        chosen = setup(seq_len=128, micro_batch_size=1, fused_layers=True, **levers)
        record(LLAMA, chosen)
    return said


def test_layers_that_are_recorded_first_stand_for_all():
    """Else a recording takes twice as long."""
    cases = [{"processes": 1}, {"processes": 2}, {"processes": 4, "replicas": 2}]
    assert run_distributed(refusals, cases, world_size=1) == [[]]


def test_what_torch_refuses_is_told_in_words(process):
    """Here, to divide 8 heads among 3 groups."""
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 3, "mamba_d_state": 16}
    hybrid = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}
    config = LLAMA | hybrid | mamba | {"num_hidden_layers": 2, "num_local_experts": 0}
    chosen = setup(seq_len=128, processes=1, targets=("q_proj",))
    with pytest.raises(NotRecordedError, match="cannot be recorded with this model"):
        process.record(config, chosen)


def test_replay_of_a_recording_of_126_layers_is_a_few_million_calls(process):
    chosen = setup(
        seq_len=128, fused_layers=True, offload_activations=True, offload_window_bytes=131072
    )
    tape = process.record(LLAMA | {"num_hidden_layers": 126}, chosen)
    assert num_calls(lambda: replay(tape)) < 8_000_000


def test_few_layers_stand_for_all():
    assert len(representatives(["same"] * 126, reach=2)) == 6
    by_turns = representatives(["window", "full"] * 40, reach=2)
    assert by_turns == [0, 1, 2, 75, 76, 77, 78, 79]
    dense_first = representatives(["dense"] * 3 + ["experts"] * 58, reach=2)
    assert dense_first == [0, 1, 2, 55, 56, 57, 58, 59, 60]


def test_layers_that_are_all_different_stand_for_themselves():
    assert representatives([*range(9)], reach=2) == [*range(9)]


def test_layers_that_are_alike_and_ask_for_different_things_are_not_repeated():
    tape = LayerTape()
    for layer in range(6):
        tape.layer = layer
        tape.new(512 * (1 + (layer == 3)), "layer_workspace")
    with pytest.raises(NotRepeatableError, match="do not ask for the same"):
        repeated(tape, ["same"] * 6, ["same"] * 9, reach=2)


def test_release_names_the_tensor_of_the_layer_as_far_away():
    tape = LayerTape()
    tape.follows_tensors = False
    before = -1
    for layer in range(6):
        tape.layer = layer
        made = tape.new(512, "layer_workspace")
        if before >= 0:
            tape.free(before)
        before = made
    new = repeated(tape, ["same"] * 6, ["same"] * 8, reach=2)
    assert new.events == [0, 1, ~0, 2, ~1, 3, ~2, 4, ~3, 5, ~4, 6, ~5, 7, ~6]

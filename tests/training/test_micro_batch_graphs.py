"""Micro-batches in fixed layouts, captured and replayed; on a CPU a capture is the function
itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.captures import ALONE, Captures
from tests.support.distributed import TIMEOUT_S
from tests.support.families import tiny_family
from tests.support.models import adapted, quantized
from tests.support.rounding import assert_rounded
from tests.support.training_loops import BATCH, CLIP, SEQ_LEN, STEPS, settings, trainer
from workflow.lib.distributed.world import process_group
from workflow.lib.model.documents import documents_of
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.batches import make_batch
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs, forward_backward

SLOPE = torch.tensor(0.25)


@pytest.fixture(scope="module", params=["qwen3_5_text", "falcon_h1"])
def recurrent(request, tmp_path_factory):
    """The base of a model with recurrent layers."""
    folder = tmp_path_factory.mktemp("recurrent")
    return quantized(tiny_family(request.param, folder / "original"), folder / "nf4")


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    for name, value in (values | address).items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def training(base):
    return adapted(base, r=4)


def batch(*, documents=2, trained=5, rows=2):
    """Rows of SEQ_LEN tokens, of which each has so many documents; `trained` of all are."""
    draw = np.random.default_rng(documents)
    length = -(-SEQ_LEN // documents)
    mask = np.zeros((rows, SEQ_LEN), dtype=bool)
    mask.reshape(-1)[1 : trained + 1] = True
    return replace(
        make_batch(
            draw.integers(0, 50, (rows, SEQ_LEN)),
            np.tile(np.arange(SEQ_LEN) % length, (rows, 1)),
            mask,
            device=torch.device("cpu"),
        ),
        row_keys=torch.zeros(rows, dtype=torch.int64),
    )


def gradients(training):
    found = {name: param.grad for name, param in trainable_parameters(training).items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def run(base, captures):
    training, config = adapted(base, r=4), settings(max_grad_norm=CLIP)
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        graphs = None if captures is None else MicroBatchGraphs(training, world, lambda: captures)
        made = trainer(training, config, world, micro_batch_size=2, graphs=graphs)
        metrics = list(made.steps(first_step=0, num_steps=STEPS))
    params = trainable_parameters(training)
    return metrics, {name: param.detach().clone() for name, param in params.items()}


def test_a_run_by_replays_is_the_run_without(base, one_process):
    """Padding of trained positions and of documents changes nothing, nor do kept gradients."""
    captures = Captures()
    (plain, weights), (replayed, same_weights) = run(base, None), run(base, captures)
    assert captures.replays > STEPS * BATCH // 2 / 2
    for one, other in zip(plain, replayed, strict=True):
        assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
    # AdamW enlarges what rounding leaves of gradients near zero
    assert_rounded(same_weights, weights, share=1e-3)


def packed(*lengths):
    tokens = sum(lengths)
    places = np.concatenate([np.arange(length) for length in lengths])[None]
    ids = np.random.default_rng(len(lengths)).integers(3, 50, (1, tokens))
    mask = places > 0
    return replace(
        make_batch(
            ids,
            places,
            mask,
            by_token={"weights": (places % 3 / 2).astype(np.float32)},
            device=torch.device("cpu"),
        ),
        row_keys=torch.zeros(1, dtype=torch.int64),
        documents=documents_of(lengths),
    )


def test_documents_of_recurrent_layers_are_those_of_each_micro_batch(recurrent):
    """Shapes stay as they were captured; shorter or fewer documents fit into them. In fp32 a row
    that is filled up otherwise is summed otherwise."""
    training, captures = adapted(recurrent, r=4), Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    batches = [packed(17, 6), packed(6, 17), packed(8, 3, 12), packed(2, 18, 3)]
    for number, one in enumerate((*batches, packed(23))):
        expected = forward_backward(training, one, SLOPE)
        right = gradients(training)
        training.zero_grad(set_to_none=False)
        torch.testing.assert_close(graphs(one, SLOPE), expected, rtol=1e-5, atol=0)
        for name, gradient in gradients(training).items():
            largest = float(right[name].abs().max())
            torch.testing.assert_close(gradient, right[name], rtol=0, atol=1e-4 * largest)
        training.zero_grad(set_to_none=False)
        if number == 1:
            assert (captures.count, captures.replays) == (1, 1)
    # two documents of 8 tokens and more have another room, which the fourth fits into
    assert (captures.count, captures.replays) == (2, 2)


def test_graphs_are_off_where_recurrent_layers_would_be_filled_up_twice(recurrent, caplog):
    """Long documents of some micro-batches and many short ones of others need room by turns."""
    training, captures = adapted(recurrent, r=4), Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    for _ in range(2):
        graphs(packed(17, 6), SLOPE)
    short = packed(3, 3, 3, 3, 3, 3, 3, 2)
    expected = forward_backward(training, short, SLOPE)
    torch.testing.assert_close(graphs(short, SLOPE), expected)
    assert (captures.count, captures.replays) == (1, 1)
    assert "documents of too different lengths for its recurrent layers" in caplog.text
    graphs(packed(17, 6), SLOPE)
    assert captures.replays == 1


def test_what_cannot_be_captured_runs_as_ever(base, one_process, caplog):
    captures = Captures(fails=True)
    (plain, _), (refused, _) = run(base, None), run(base, captures)
    assert captures.count == 1
    assert "operation not permitted when stream is capturing)" in caplog.text
    assert [m.loss for m in refused] == pytest.approx([m.loss for m in plain], rel=1e-5)


def test_each_layout_is_captured_at_its_second_micro_batch(training):
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    for documents in (1, 2, 3, 1, 2):  # 4 and 6 documents have room in one layout
        graphs(batch(documents=documents), SLOPE)
    assert (captures.count, captures.replays) == (2, 3)


def test_graphs_make_room_for_a_layout_that_python_launches(training):
    """Both would not fit where one is planned for. They are captured anew when they are needed."""
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    for rows, count in ((2, 0), (2, 1), (1, 1), (2, 2), (1, 3), (2, 3)):
        graphs(batch(documents=1, rows=rows), SLOPE)
        assert captures.count == count


def test_embedding_rows_of_each_micro_batch_are_those_that_a_graph_reads(base):
    training = adapted(base, r=4)
    table = torch.randn(50, training.peft_model.get_base_model().config.hidden_size)
    training.rows_of = lambda ids: table[ids]
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    losses = []
    for number in range(3):
        plain = batch()
        ids = (plain.input_ids + number) % 50
        looked_up = replace(plain, input_ids=ids, embedded=table[ids.flatten()])
        losses.append((graphs(looked_up, SLOPE), forward_backward(training, looked_up, SLOPE)))
    assert captures.replays == 2
    for replayed, expected in losses:
        torch.testing.assert_close(replayed, expected)
    assert losses[1][0] != losses[2][0]


def test_more_documents_than_there_is_room_for_begin_anew(training):
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    expected = [forward_backward(adapted_like(training), batch(documents=n), SLOPE) for n in (2, 9)]
    for number, documents in ((0, 2), (0, 2), (1, 9), (1, 9), (0, 2)):
        loss = graphs(batch(documents=documents), SLOPE)
        torch.testing.assert_close(loss, expected[number])
    assert captures.count == 2


def test_layouts_are_of_the_longest_document_so_far(training):
    """Attention starts blocks for that many tokens of each document."""
    graphs = MicroBatchGraphs(training, ALONE, Captures)
    for lengths, longest in (((5, 3, 4, 4), 8), ((4, 4, 4, 4), 8), ((9, 7), 16), ((8, 8), 16)):
        own = packed(*lengths)
        expected = forward_backward(adapted_like(training), own, SLOPE)
        torch.testing.assert_close(graphs(own, SLOPE), expected)
        assert {layout.longest for layout in graphs._inputs} == {longest}


def test_rows_of_any_lengths_follow_each_other(training):
    """The rows of pairs and groups, also those on both sides of a power of two."""
    graphs = MicroBatchGraphs(training, ALONE, Captures)
    for lengths in ((5, 4), (4, 3), (9, 8), (4, 3)):
        own = packed(*lengths)
        expected = forward_backward(adapted_like(training), own, SLOPE)
        torch.testing.assert_close(graphs(own, SLOPE), expected)
    assert graphs.off is None


def adapted_like(training):
    """The same model: what is added to its gradients is taken away at once."""
    training.zero_grad(set_to_none=True)
    return training


def test_a_micro_batch_without_a_trained_token_has_no_gradient(training):
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    losses = [graphs(batch(trained=0), SLOPE) for _ in range(2)]
    assert captures.replays == 1
    assert not any(losses)
    assert not any(grad.any() for grad in gradients(training).values())


def test_gradients_that_are_gone_are_noticed(training):
    graphs = MicroBatchGraphs(training, ALONE, Captures)
    for _ in range(2):
        graphs(batch(), SLOPE)
    training.zero_grad(set_to_none=True)
    with pytest.raises(AssertionError, match="gradients that are gone"):
        graphs(batch(), SLOPE)


def test_released_graphs_are_captured_anew(training):
    captures = Captures()
    graphs = MicroBatchGraphs(training, ALONE, lambda: captures)
    for _ in range(2):
        graphs(batch(), SLOPE)
    graphs.release()
    before = gradients(training)
    graphs(batch(), SLOPE)
    assert captures.count == 2
    name = next(key for key in before if "lora_B" in key)
    torch.testing.assert_close(gradients(training)[name], before[name] * 1.5)


def test_nothing_that_was_made_of_adapters_before_is_read_by_a_graph(training):
    """A cast that was kept lies in memory that is given to others once the step is done."""
    seen = []

    def capture(function):
        kept = training.adapters.casts()
        seen.append(len(kept or {}))
        return function

    graphs = MicroBatchGraphs(training, ALONE, lambda: capture)
    with training.adapters.unchanged():
        kept = training.adapters.casts()
        kept["of another micro-batch"] = torch.zeros(())
        for _ in range(2):
            graphs(batch(), SLOPE)
        assert training.adapters.casts() is kept
    assert seen == [0]

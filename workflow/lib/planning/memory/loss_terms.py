"""The terms of the memory model around embedding and head: the loss in chunks of rows, and the
gradients of tables that are trained whole.

Letters as in `terms`.
"""

import math

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.vocabulary_slices import (
    GRADIENT_ROWS,
    chunk_rows,
    exchanged_rows,
)
from workflow.lib.planning.memory.terms import Terms, table_slice
from workflow.lib.step_plan.plan import StepPlan


def loss_terms(shape: ModelShape, setup: StepPlan) -> Terms:
    """Chunked cross-entropy over at most all T rows.

    Hidden: norm's fp32 copy, its output, the chosen rows and their gradient. Logits: log-softmax,
    its gradient and the one that it comes from, fp32 each; with soft-capping the tanh too. By
    kernels the head's product alone, which becomes its gradient.
    """
    c, t, h = setup.compute_bytes, setup.tokens, shape.hidden_size
    hidden = {"hidden_states": (4 + 3 * c) * t * h} | _trained_head_terms(shape, setup)
    if setup.slices > 1:
        return hidden | _sliced_loss_terms(shape, setup)
    width = c if setup.fused_loss else 16 if shape.logit_softcap else 12
    rows = min(t, chunk_rows(1, vocab_size=shape.vocab_size))
    return hidden | {"logits": width * rows * shape.vocab_size}


def _trained_head_terms(shape: ModelShape, setup: StepPlan) -> Terms:
    """Of a trained head: its copy in the compute type, the product that its gradient is made from,
    and a piece of that; its gradient in fp32.
    """
    if not setup.trains_head:
        return {}
    c, columns = setup.compute_bytes, math.ceil(shape.vocab_size / setup.slices)
    size = chunk_rows(setup.slices, vocab_size=shape.vocab_size)
    product = c * setup.slices * min(setup.tokens, size) * columns
    product = 0 if setup.fused_loss else product  # it is the logits
    copy = table_slice(shape, setup, width=c) if c < 4 else 0
    return {
        "module_workspace": copy + product + gradient_piece(shape, setup),
        "new_module_gradients": table_slice(shape, setup, width=4),
    }


def gradient_piece(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of what is made of a trained head's gradient at a time (`chunked_loss.TrainedHead`)."""
    rows = min(GRADIENT_ROWS, math.ceil(shape.vocab_size / setup.slices))
    return setup.compute_bytes * rows * shape.hidden_size


def exchanged_gradients(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of the embedding rows' gradients of all slices that travel at a time, as they are sent,
    in fp32, and without the rows of others.
    """
    if setup.slices == 1:
        return 0
    rows = setup.slices * min(setup.tokens, exchanged_rows(setup.slices))
    return (setup.compute_bytes + 8) * rows * shape.hidden_size


def _sliced_loss_terms(shape: ModelShape, setup: StepPlan) -> Terms:
    """Of a chunk of rows of all G processes: their hidden states and gradient, the latter in fp32
    too, and this slice's logits.

    Logits: themselves, which become probabilities in place, and a temporary of log-sum-exp; with
    soft-capping what its backward makes.
    """
    rows = setup.slices * min(setup.tokens, chunk_rows(setup.slices, vocab_size=shape.vocab_size))
    c = setup.compute_bytes
    states = 2 * c + (0 if c == 4 else 4)
    width = c if setup.fused_loss else 16 if shape.logit_softcap else 8
    return {
        "gathered_rows": states * rows * shape.hidden_size,
        "logits": width * rows * math.ceil(shape.vocab_size / setup.slices),
    }

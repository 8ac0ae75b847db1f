"""Which rows and documents go through a layer together."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workflow.lib.quantization import calibration_rows
from workflow.lib.quantization.calibration_rows import measured_batches, rows_at_once

CPU = torch.device("cpu")


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
    monkeypatch.setattr(calibration_rows, "SCORES", 4 * 50**2)
    documents = [(np.arange(length), np.arange(length) > 3) for length in (90, 7, 51)]
    store = SimpleNamespace(heldout_documents=lambda: documents)
    batches = measured_batches(store, device=CPU, eager_heads=eager_heads)  # type: ignore[arg-type]
    assert [batch.input_ids.shape for batch in batches] == [
        (1, min(longest, length)) for length in (90, 7, 51)
    ]
    assert all(batch.counted is not None for batch in batches)

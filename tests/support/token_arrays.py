"""The arrays of a tokens folder by their names."""

from typing import Any

ROWS, DOCUMENTS = ("input_ids", "loss_mask", "position_ids"), ("input_ids", "loss_mask", "offsets")
NAMES = [f"train.{name}.npy" for name in ROWS] + [f"heldout.{name}.npy" for name in DOCUMENTS]


def token_arrays(*rows: Any, heldout: tuple[Any, ...]) -> dict[str, Any]:
    """Return ids, masks and positions of rows, and ids, masks and offsets of held-out documents."""
    return dict(zip(NAMES, (*rows, *heldout), strict=True))

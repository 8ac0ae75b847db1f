"""The tokens that calibrate: rows of the run's training tokens, and of a text of the user's own."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.quantization.layer_stream import Batch
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.input_files import read_input

logger = logging.getLogger("workflow")

SEED = 0  # of the rows and documents that are drawn
BATCH_TOKENS = 8192  # that go through a layer at once
MEASURED_DOCUMENTS = 64  # held out, that show what 4 bits cost
MEASURED_TOKENS = 32_768  # of them at most: each is cut at its share
# Of eager attention, that a layer makes at once: 2 GiB in 8 bytes each. One row may have more.
SCORES = 2**28
MOST_BYTES = 2**32  # of a calibration text, which is read whole


def calibration_batches(
    settings: QuantizeConfig,
    store: TokenStore,
    model: Path,
    *,
    device: torch.device,
    eager_heads: int = 0,
) -> list[Batch]:
    """Return batches of `calibration_tokens` training tokens, half of them of `calibration_text` if
    given. eager_heads: that make all scores of a row. Raises `UserError` for too few rows or
    tokens."""
    wanted = settings.calibration_tokens
    size = rows_at_once(store.seq_len, eager_heads=eager_heads)
    general: list[Batch] = []
    if settings.calibration_text is not None:
        ids = text_rows(settings.calibration_text, model, tokens=wanted // 2, width=store.seq_len)
        general = _batches(ids, None, device, size=size)
        wanted -= ids.size
    return _training_batches(store, tokens=wanted, device=device, size=size) + general


def rows_at_once(width: int, *, eager_heads: int) -> int:
    scores = max(1, eager_heads) * width**2
    return max(1, min(BATCH_TOKENS // width, SCORES // scores))


def _training_batches(
    store: TokenStore, *, tokens: int, device: torch.device, size: int
) -> list[Batch]:
    if not store.num_rows:
        raise UserError("calibration: the tokens hold no training row. Set quantize.method: absmax")
    wanted = max(1, round(tokens / store.seq_len))
    count = min(store.num_rows, wanted)
    if count < wanted:
        logger.warning(
            "quantize.calibration_tokens asks for %d rows of %d tokens, and there are %d: all "
            "calibrate",
            wanted,
            store.seq_len,
            count,
        )
    drawn = np.random.default_rng(SEED).choice(store.num_rows, size=count, replace=False)
    rows = sorted(drawn.tolist())
    batches = _batches(store.input_ids[rows], store.position_ids[rows], device, size=size)
    filling = store.manifest["pad_token_id"]
    return [replace(batch, counted=batch.input_ids != filling) for batch in batches]


def text_rows(path: str, model: Path, *, tokens: int, width: int) -> np.ndarray:
    """Return rows (rows, width) of a UTF-8 file's tokens, `tokens` in all, or raise `UserError`."""
    try:
        text = read_input(Path(path), most_bytes=MOST_BYTES)
    except UserError as error:
        raise setting_error(
            "quantize.calibration_text", path, f"it cannot be read as UTF-8 text ({error})",
            "Name a text file, or remove the setting",
        ) from None  # fmt: skip
    ids = load_tokenizer(model)(text, add_special_tokens=False).input_ids
    rows = min(len(ids), tokens) // width
    if not rows:
        raise setting_error(
            "quantize.calibration_text", path,
            f"it has {len(ids)} tokens, and a row (data.seq_len) {width}",
            "Name a longer text, or remove the setting",
        )  # fmt: skip
    return np.asarray(ids[: rows * width], dtype=np.int64).reshape(rows, width)


def _batches(
    ids: np.ndarray, positions: np.ndarray | None, device: torch.device, *, size: int
) -> list[Batch]:
    def tensor(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    return [
        Batch(
            tensor(ids[first : first + size]),
            None if positions is None else tensor(positions[first : first + size]),
        )
        for first in range(0, len(ids), size)
    ]


def measured_batches(
    store: TokenStore, *, device: torch.device, eager_heads: int = 0
) -> list[Batch]:
    """Return held-out documents, a batch each, drawn by `SEED`, about `MEASURED_TOKENS` in all, cut
    where `eager_heads` would make more than `SCORES`."""
    documents = store.heldout_documents()
    chosen = choose_documents(documents, at_most=MEASURED_DOCUMENTS, seed=SEED)
    longest = max(1, MEASURED_TOKENS // max(1, len(chosen)))
    longest = min(longest, math.isqrt(SCORES // max(1, eager_heads)))
    batches = []
    for ids, mask in (documents[number] for number in chosen):
        counted = torch.from_numpy(np.array(mask[:longest]))
        if counted.any():
            batch = _batches(np.asarray(ids[:longest]).reshape(1, -1), None, device, size=1)[0]
            batches.append(replace(batch, counted=counted.reshape(1, -1).to(device)))
    return batches

"""The number of sequences in a batch: estimated from free memory, then halved until they fit.

The estimate prevents most out-of-memory errors; others (fragmentation, kernels' workspace) are
caught, and the batch halved. Rounding aside, no number depends on the batch size."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from workflow.lib.system.errors import BatchMemoryError, setting_error
from workflow.lib.system.hardware import available_host_bytes

logger = logging.getLogger("workflow")

T = TypeVar("T")
LARGEST = {"cuda": 64, "cpu": 16}  # sequences; beyond it neither gets faster
USABLE_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of free memory; on a CPU other processes take of it too


def fitting_batch_size(
    setting: int | str,
    *,
    config: Any,
    device: torch.device,
    tokens: int,
    keeps_cache: bool = False,
    largest: Mapping[str, int] = LARGEST,
) -> int:
    """Return the number of sequences of `tokens` tokens to try first: `setting`, or for `auto` the
    power of two that should fit. keeps_cache: generation, which keeps keys and values."""
    if setting != "auto":
        return int(setting)
    row_bytes = tokens * token_bytes(config, keeps_cache=keeps_cache)
    fitting = int(USABLE_SHARE[device.type] * free_bytes(device)) // row_bytes
    return max(1, min(largest[device.type], 1 << max(0, fitting.bit_length() - 1)))


def token_bytes(config: Any, *, keeps_cache: bool) -> int:
    """Return the approximate bytes of one token in an evaluation forward, without weights. 4 bytes
    a value: six vectors of the hidden size, three of the MLP's; logits three times; keys and
    values."""
    text = config.get_text_config()
    layer = 6 * text.hidden_size + 3 * (text.intermediate_size or 4 * text.hidden_size)
    cache = 2 * text.num_hidden_layers * text.hidden_size if keeps_cache else 0
    return int(4 * (layer + 3 * text.vocab_size + cache))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the model's device; of several GPUs, on the fullest."""
    if device.type == "cpu":
        return available_host_bytes()
    return min(
        torch.cuda.mem_get_info(index)[0]
        for index in range(torch.cuda.device_count())
        if torch.cuda.memory_allocated(index) or index == (device.index or 0)
    )


def batches(
    lengths: Sequence[int],
    alike: Sequence[tuple[int, ...]],
    *,
    size: int,
    most_tokens: int | None = None,
) -> Iterator[list[int]]:
    """Yield numbers of sequences in batches of at most `size`, with padding `most_tokens`, of equal
    `alike` and similar length, longest first: a batch that does not fit fails at once."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        full = len(batch) == size or (
            most_tokens is not None and batch and (len(batch) + 1) * lengths[batch[0]] > most_tokens
        )
        if batch and (full or alike[batch[0]] != alike[number]):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def halving(compute: Callable[[int], T], *, start: int, what: str, collective: bool = False) -> T:
    """Return `compute(batch size)` for the first of start, start / 2, ..., 1 that fits in memory.
    what: for the log. collective: raise `BatchMemoryError`, for which `restarting` begins anew, as
    the other processes wait within a forward. Raises `UserError` if one sequence does not fit."""
    size = start
    while True:
        try:
            return compute(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            reason = str(error).splitlines()[0]
        if size == 1:
            raise setting_error(
                "evaluate.batch_size",
                1,
                f"{what} runs out of memory with a single sequence ({reason})",
                "Shorten documents (data.seq_len) or answers (evaluate.max_new_tokens), or use "
                "more GPUs",
            )
        if collective:
            raise BatchMemoryError(size)
        size //= 2
        logger.info("%s: out of memory, going on with batches of %d", what, size)
        gc.collect()
        torch.cuda.empty_cache()


def restarting(launch: Callable[[int | None], None]) -> None:
    """Call `launch(None)`, and if processes in step run out of memory, again with half the batch at
    most. Finished parts are archived, so only the rest is measured again."""
    most = None
    while True:
        try:
            return launch(most)
        except BatchMemoryError as error:
            most = error.size // 2
            logger.info("out of memory: starting again with batches of %d at most", most)

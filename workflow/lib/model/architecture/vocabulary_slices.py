"""How processes divide the vocabulary and its rows: for the engine and its predictions."""

import math

CHUNK_ROWS = 1024  # rows that travel, and whose logits exist, at a time
# At most: 128 MiB in 16 bits; torch's operations have two or three copies in fp32 of 256 MiB each.
# These are 256 rows of Gemma 3's vocabulary. Matmuls of 128 rows are bound by reading the head: 47
# ms for 4,096 rows, where 256 at a time take 26 (12B, H100, profiled, November 2026).
CHUNK_LOGITS = 256 * 262_208
FEWEST_ROWS = 128  # of one process in a chunk: with fewer the network's latency would count
# of a trained head: so much of its gradient is made in the compute dtype before it is added in fp32
GRADIENT_ROWS = 8192
# What travels grows with the number of slices, what is stored shrinks with it. A head in 8 slices
# is small already.
ENOUGH_SLICES = 8


def vocabulary_slices(shards: int) -> int:
    """Return over how many neighbouring processes embedding and head are cut, of `shards`: all of
    up to 8, else their smallest divisor from 8 on."""
    enough = min(shards, ENOUGH_SLICES)
    return next(count for count in range(enough, shards + 1) if shards % count == 0)


def chunk_rows(slices: int, *, vocab_size: int) -> int:
    """Return the rows that each process with a slice contributes to a chunk of the loss."""
    fitting = CHUNK_LOGITS // math.ceil(vocab_size / slices) // FEWEST_ROWS * FEWEST_ROWS
    return max(min(CHUNK_ROWS, fitting) // slices, FEWEST_ROWS)


def exchanged_rows(slices: int) -> int:
    """Return how many embedding rows each of the processes with a slice asks for at a time."""
    return max(CHUNK_ROWS // slices, FEWEST_ROWS)

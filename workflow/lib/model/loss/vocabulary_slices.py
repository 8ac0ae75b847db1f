"""How processes divide the vocabulary and its rows: for the engine and its predictions."""

import math

CHUNK_ROWS = 1024  # rows exchanged at a time, which have logits in memory
# At most: 128 MiB in 16 bits; torch's operations have two or three copies in fp32 of 256 MiB each.
# These are 256 rows of Gemma 3's vocabulary. Matmuls of 128 rows are bound by reading the head: 47
# ms for 4,096 rows, where 256 at a time take 26 (12B, H100, profiled, November 2026).
CHUNK_LOGITS = 256 * 262_208
FEWEST_ROWS = 128  # rows of one process in a chunk: with fewer the network's latency would count
# Rows of a trained head's gradient in the compute dtype, before they are added in fp32.
GRADIENT_ROWS = 8192
# Chunks of a trained head are so many times larger: each adds a gradient of the whole head in fp32.
# With 8 chunks that took 24 of 139 ms (8 layers of 8B, H200, profiled 2026-11-30).
TRAINED_ROWS = 4
# Traffic grows with the number of slices, storage shrinks with it. A head in 8 slices is small
# already.
ENOUGH_SLICES = 8


def vocabulary_slices(shards: int) -> int:
    """Return the number of slices of embedding and head over `shards` processes: all up to 8, else
    their smallest divisor from 8 on."""
    enough = min(shards, ENOUGH_SLICES)
    return next(count for count in range(enough, shards + 1) if shards % count == 0)


def chunk_rows(slices: int, *, vocab_size: int, times: int = 1) -> int:
    """Return the rows that each process with a slice contributes to a chunk of the loss. times: how
    much larger chunks are."""
    fitting = CHUNK_LOGITS // math.ceil(vocab_size / slices) // FEWEST_ROWS * FEWEST_ROWS
    return times * max(min(CHUNK_ROWS, fitting) // slices, FEWEST_ROWS)


def exchanged_rows(slices: int) -> int:
    """Return the embedding rows that each process with a slice requests at a time."""
    return max(CHUNK_ROWS // slices, FEWEST_ROWS)

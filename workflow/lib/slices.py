"""How processes divide the vocabulary and the rows of its loss: plain arithmetic, for the engine and for its predictions."""

CHUNK_ROWS = 1024  # rows whose logits exist at a time: of a 128k vocabulary in fp32 0.5 GiB
FEWEST_ROWS = 128  # of one process in a chunk: with fewer the network's latency would count
# What travels grows with the number of slices, what is stored shrinks with it. A head in 8 slices is small already.
ENOUGH_SLICES = 8


def vocabulary_slices(shards: int) -> int:
    """Return over how many neighbouring processes embedding and head are cut, of `shards` that share a copy of the model.

    All of up to 8; of more, the smallest divisor of their number that is at least 8.
    """
    enough = min(shards, ENOUGH_SLICES)
    return next(count for count in range(enough, shards + 1) if shards % count == 0)


def spread(count: int, total: int) -> list[int]:
    """Return `count` of the numbers 0 to `total` - 1, spread evenly; up to half of them are never neighbours."""
    return [(2 * place + 1) * total // (2 * count) for place in range(count)]


def chunk_rows(slices: int) -> int:
    """Return how many rows each of the processes with a slice contributes to a chunk of the loss."""
    return CHUNK_ROWS if slices == 1 else max(CHUNK_ROWS // slices, FEWEST_ROWS)

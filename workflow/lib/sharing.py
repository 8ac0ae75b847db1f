"""Several processes that share one evaluation, each with a whole copy of the model and every n-th item.

Answers are gathered in the order of the items, so what is computed from them cannot depend on the number of
processes. A model larger than one GPU is not copied: one process spreads it over all of them (`inference.load_base`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from workflow.lib.errors import UserError, setting_error
from workflow.lib.parallel import World

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Of a GPU's memory, what the weights may take if each process is to have a copy; the rest is for activations.
WEIGHTS_SHARE = 0.6


def evaluation_processes(
    setting: int | str, *, folders: Sequence[Path], gpu_bytes: Sequence[int]
) -> int:
    """Return how many processes share an evaluation: `setting`, or for `auto` one a GPU if the models fit, else 1.

    folders: the models, in safetensors files. gpu_bytes: the memory of each GPU; none means the CPU, where `auto` is
    1, as all cores work for one process already.
    Raises `UserError` if a number asks for more than the GPUs, or for copies that do not fit on one.
    """
    largest = max(sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in folders)
    fits = all(largest <= WEIGHTS_SHARE * total for total in gpu_bytes)
    most = len(gpu_bytes) if fits else 1
    if setting == "auto":
        return max(1, most)
    if gpu_bytes and int(setting) > most:
        raise setting_error(
            "evaluate.processes",
            setting,
            f"{largest / 2**30:.1f} GiB of weights leave room for {most} process(es) on {len(gpu_bytes)} GPU(s)",
            "Lower it, or set auto",
        )
    return int(setting)


def shared_out(
    items: Sequence[ItemT],
    compute: Callable[[list[ItemT]], Sequence[ResultT]],
    *,
    world: World | None,
) -> list[ResultT]:
    """Return `compute(items)`, one result an item, each process computing its share. Collective; None = alone.

    `compute` gets a list (it may be empty) and must not depend on which items come together.
    """
    if world is None or world.size == 1:
        return list(compute(list(items)))
    parts: list[Any] = [None] * world.size
    mine = list(compute(list(items[world.rank :: world.size])))
    dist.all_gather_object(parts, mine, group=world.io_group)
    results: list[Any] = [None] * len(items)
    for rank, part in enumerate(parts):
        results[rank :: world.size] = part
    return results


def agreed(value: ItemT, *, world: World | None) -> ItemT:
    """Return the main process's `value` on every process. Collective; None = alone."""
    if world is None or world.size == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=world.io_group)
    result: ItemT = box[0]
    return result


@contextmanager
def main_first(world: World | None) -> Iterator[None]:
    """Let the main process go through the block before all others: files that it makes are there for them.

    Where it fails, the others raise `UserError` without going through the block. Collective; None = alone.
    """
    if world is not None and not world.is_main:
        if not agreed(True, world=world):
            raise UserError("The main process failed; its message tells why.")
        yield
        return
    try:
        yield
    except BaseException:
        agreed(False, world=world)
        raise
    agreed(True, world=world)

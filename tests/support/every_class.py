"""Every class of the installed Transformers of which a decoder can be taken, with its own settings
made narrow: is it trained as stock does, or refused in a line?

`python -m tests.support.every_class [FAMILY...]` prints what becomes of each."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.utils import logging

from tests.support.families import tiny_model
from tests.support.family_runs import (
    exported,
    family_store,
    run_family,
    stock_gradients,
    stock_model,
)
from tests.support.models import quantized
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import TABLES
from workflow.lib.distributed.world import process_group
from workflow.lib.export.trial import narrow_, shorten_, try_exports
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError

MOST_S = 300
ALONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}
RIGHT, NOT_MADE = "right", "not made: "
CLOSE = 1e-4  # of a loss
DRAWN = ("phimoe",)  # its router draws experts at random in training


def every_class() -> list[str]:
    """Return the types of all models that the auto classes of this workflow build."""
    return [*dict.fromkeys(name for table in TABLES.values() for name in table)]


def outcome(family: str, folder: Path) -> str:
    """Return `RIGHT`, `NOT_MADE` and why, or a refusal; raises any other error."""
    try:
        config = AutoConfig.for_model(family)
        layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or [0]
        shorten_(config, max(1, *map(layers.index, layers)) + 1)
        narrow_(config)
        text = config.get_text_config(decoder=True)
        for name in [name for name, x in vars(text).items() if "drop" in name and type(x) is float]:
            setattr(text, name, 0.0)  # stock is compared without dropout
        tiny_model(config, folder / "original")
    except Exception as error:
        return f"{NOT_MADE}{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    try:
        shape = describe_checkpoint(Checkpoint.open(folder / "original"))
        try_exports(Checkpoint(folder / "original"), shape)
        quantized(folder / "original", folder / "nf4")
        with process_group("cpu", timeout_s=MOST_S) as world:
            ours = run_family(folder, world, "run", fused=True, break_checks=False, number=0)
    except UserError as refusal:
        return str(refusal)
    if family in DRAWN:
        return RIGHT
    stock = stock_gradients(stock_model(folder, exported(folder / "run")), family_store("packed"))
    assert abs(ours["packed"]["loss"] / stock["loss"] - 1) < CLOSE, (
        ours["packed"]["loss"],
        stock["loss"],
    )
    return RIGHT


def outcome_in_a_process(family: str) -> str:
    """Return `outcome`, or the traceback, of a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "outcome"
        if pid := os.fork():
            os.waitpid(pid, 0)
            return result.read_text() if result.is_file() else "the process ended without a word"
        try:
            os.environ.update(ALONE)
            logging.set_verbosity_error()
            torch.set_num_threads(1)
            result.write_text(outcome(family, Path(name)))
        except BaseException:
            result.write_text(traceback.format_exc())
        finally:
            os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[1:] or every_class():
        print(f"{name}: {outcome_in_a_process(name)}", flush=True)

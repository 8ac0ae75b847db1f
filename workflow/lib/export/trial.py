"""What follows a training, tried on a narrow random model of the class before it.

The NF4 base and an adapter on all linears are loaded by stock packages, evaluated, and merged under
the published names. The trial has the first layers of all kinds, and takes about a second."""

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import quiet_transformers, said_by
from workflow.lib.export.adapter_files import merged_model
from workflow.lib.export.narrow_model import (
    narrow_,
    plain_config,
    shorten_,
    write_narrow_adapter,
    write_random,
)
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.quantization.nf4_checkpoint import write_plain_base
from workflow.lib.scores.scoring import kept_logits
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError

IDS = torch.arange(9)[None]
STOCK: dict[str, Any] = {
    "device": torch.device("cpu"),
    "compute_dtype": torch.float32,
    "attention": "eager",
}

logger = logging.getLogger("workflow")


def try_exports(source: Checkpoint, shape: ModelShape) -> None:
    """Raise `UserError` if a training on `source` could not be exported, evaluated or
    merged. A model that cannot be made narrow is logged."""
    step = ""
    with TemporaryDirectory() as name, quiet_transformers():
        try:
            config = plain_config(source, Path(name))
            shorten_(config, max(1, *map(shape.order.index, shape.order)) + 1)
            narrow_(config)
            write_random(config, Path(name) / "model", dtype=torch.float32)
            # The narrow sizes fit each other if stock Transformers runs its own file.
            load_base(Checkpoint(Path(name) / "model"), **STOCK)(input_ids=IDS, use_cache=False)
            for step in _steps(Path(name)):
                logger.debug("trial: %s", step)
        except Exception as error:
            if step:
                raise UserError(
                    f"{source.folder}: model_type = {config.model_type!r}: {step} fails "
                    f"({said_by(error)}). This was tried on a narrow random model of the class, "
                    "since after a training it would be too late. Choose another model.source."
                ) from None
            logger.info("exports are not tried before the training (%s)", said_by(error))


def _steps(folder: Path) -> Iterator[str]:
    """Go the way of the model in `folder`/model, and yield the name of each step before it."""
    model, base = Checkpoint(folder / "model"), Checkpoint(folder / "nf4")
    yield "its quantization"
    write_plain_base(model, base.folder, QuantizeConfig())
    yield "saving an adapter of it"
    adapter = write_narrow_adapter(model, folder / "adapter")
    yield "loading its base in stock Transformers"
    stock = load_base(base, **STOCK)
    yield "loading its adapter in stock PEFT"
    tuned = load_adapter(stock, Adapter(folder / "adapter"))
    yield "its evaluation"
    columns = torch.arange(1, IDS.numel(), 3)
    with torch.no_grad():
        logits = kept_logits(tuned, columns, input_ids=IDS, use_cache=False)
    assert logits.shape[:2] == (1, len(columns)), f"logits of shape {[*logits.shape]}"
    yield "merging it"
    with model.stored() as published:
        expected = {name: published.shape(name) for name in published.names()}
    tensors = merged_model(*adapter, original=model, base=base, onto="dequantized")
    merged = {name: tuple(tensor.shape) for name, tensor in tensors}
    wrong = sorted(name for name, _ in merged.items() ^ expected.items())
    assert not wrong, f"{wrong[0]} is not as in the published files"

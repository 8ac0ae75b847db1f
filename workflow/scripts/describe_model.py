"""Describe the base model's decoder layers, from its own class.

The class is built without weights from config.json, and run once on tokens without values. The
description is compared with the headers of the safetensors files, and the settings of the runs that
use the model with the description. Export, evaluation and merging are tried on a narrow random
model of the class. Planning reads the description. A model that is not covered, or files that do
not belong together, end with exit status 1."""

import argparse

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.conversions import CONVERSIONS
from workflow.lib.export.trial import try_exports
from workflow.lib.model.architecture.model_shape import CONFIG, DecoderLayer, ModelShape
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.planning.preflight.checks import CHECKS_HELP, check_models
from workflow.lib.settings.forms import CONVERTED
from workflow.lib.system.files import write_checked_json
from workflow.scripts.command import add_settings, command_parser, logger, run


def main(args: argparse.Namespace) -> None:
    checkpoint = Checkpoint.open(args.model)
    shape = describe_checkpoint(checkpoint)
    try_exports(checkpoint, shape)
    for form in CONVERTED:
        if any(
            run.get("export", {}).get(form) for run in (args.checks or {}).get("runs", {}).values()
        ):
            CONVERSIONS[form].check(checkpoint)
    config = checkpoint.config
    check_models(args.checks or {}, shape, config)
    write_checked_json(args.output, shape.document() | {CONFIG: config})
    logger.info("%s", facts(shape))


def facts(shape: ModelShape) -> str:
    """Return a line of facts on the model."""
    kinds = ", ".join(
        f"{shape.counts[number]} x {_mixing(kind)}" for number, kind in enumerate(shape.kinds)
    )
    weights = shape.quantized_weights + shape.plain_weights
    return f"{shape.family}: {weights:,} parameters, {shape.num_layers} decoder layers ({kinds})"


def _mixing(kind: DecoderLayer) -> str:
    """Return the attention of a layer's kind, and its number of experts."""
    parts = [f"{kind.attention} attention"] * (kind.attention != "none")
    parts += ["recurrent"] * kind.recurrent
    parts += [f"{kind.top_k} of {max(x.experts for x in kind.linears)} experts"] * bool(kind.top_k)
    return " with ".join(parts) or "neither attention nor recurrence"


if __name__ == "__main__":
    parser = command_parser(__doc__, needs="model output")
    add_settings(parser, "--checks", help=CHECKS_HELP)
    run(main, parser)

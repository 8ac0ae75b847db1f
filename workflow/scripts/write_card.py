"""Write the model card of an evaluated adapter: data, training, results, limits.

Reads the artifacts of the stages before; writes `README.md` beside the adapter's files, in the
Hugging Face hub's format.
"""

import argparse
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks, Parity, Quantization, ServedCheck
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.files.config_file import text_part
from workflow.lib.checkpoints.files.model_files import CONFIG
from workflow.lib.checkpoints.files.quantization_settings import TEXT_PART
from workflow.lib.report.model_card import CardInputs, model_card
from workflow.lib.report.verdict import read_measured
from workflow.lib.settings.config import ModelConfig, RunConfig
from workflow.lib.system.checksums import check_files, listed_files
from workflow.lib.system.files import read_json, write_text
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    config = RunConfig.model_validate(args.config)
    config_file = args.adapter_config
    check_files([f for f in listed_files(config_file.parent) if f.path == config_file])
    adapter_config = read_json(config_file)
    inputs = CardInputs(
        model_id=config.base_id,
        revision=None if config.export.nf4_base_id else adapter_config["revision"],
        adapter_config=adapter_config,
        dataset_id=config.data.source,
        dataset=config.data.name,
        quantization=read_record(args.base / "quantization.json", Quantization),
        summary=read_record(args.summary, Summary),
        manifest=read_record(args.manifest, Manifest),
        parity=read_record(args.parity, Parity),
        measured=read_measured(args.evaluation, run=args.evaluation.parent.name),
        gguf=read_record(args.gguf / "gguf.json", GgufChecks) if args.gguf else None,
        checked=read_record(args.served, ServedCheck) if args.served else None,
        nf4_base_id=config.export.nf4_base_id,
        overrides=stated_positions(config.model, args.base),
    )
    write_text(args.output, model_card(inputs))
    logger.info("model card: %s", args.output)


def stated_positions(model: ModelConfig, base: Path) -> dict[str, Any] | None:
    """Return what a base's config.json says of scaled positions, in its form; None for the
    model's own."""
    if not model.rope_scaling.parameters:
        return None
    config = read_json(base / CONFIG)
    stated = {key: text_part(config)[key] for key in ("rope_parameters", "max_position_embeddings")}
    return {TEXT_PART: stated} if TEXT_PART in config else stated


if __name__ == "__main__":
    needs = "summary adapter_config base manifest parity evaluation output"
    parser = stage_parser(__doc__, needs=needs, takes="gguf served")
    # One small file, replaced at once; a lock would remain in the published adapter's folder.
    run(main, parser, locks_itself=True)

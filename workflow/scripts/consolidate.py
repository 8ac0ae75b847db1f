"""Turn the sharded adapter into PEFT's files, and prove that they are the trained adapter.

Writes `adapter/` (adapter_model.safetensors, adapter_config.json, the tokenizer with its chat
template, generation_config.json, SHA256SUMS), `parity.json`, and on request `merged/`. If
the logits of the reloaded adapter differ from
the trained model's, or its tokenizer writes conversations differently, nothing is exported."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.export.adapter_files import (
    Trained,
    check_conversations,
    merged_model,
    read_sharded_adapter,
    replace_chat_template,
    write_generation_config,
    write_merged,
    write_peft_folder,
)
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import load_adapter, load_base, load_options
from workflow.lib.model.backends import choose_device
from workflow.lib.settings.config import ExportConfig, RunConfig
from workflow.lib.settings.objectives import needs_of
from workflow.lib.system.checksums import RecordedFile, listed_files, read_artifact
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import new_folder, write_checked_json, write_checksums
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    config = RunConfig.model_validate(args.config)
    facts = read_record(args.manifest, ConversationFacts)
    summary = read_record(args.finetune / "summary.json", Summary)
    logits = RecordedFile(args.finetune, "parity.safetensors", summary.parity_sha256)
    check_recorded([*listed_files(args.base), logits])
    original, base = Checkpoint.open(args.model), Checkpoint(args.base)
    needs = needs_of(summary.settings.train.get("objective", "sft"))
    trained = Trained(
        # of a round of equal rewards it may be
        read_sharded_adapter(args.finetune / "adapter", may_be_zero=needs.examples == "groups"),
        read_artifact(args.finetune / "adapter_config.json"),
    )
    with new_folder(args.output) as folder:
        exported = write_peft_folder(
            trained,
            folder / "adapter",
            config,
            model=original,
            base=base,
            facts=facts,
        )
        parity = prove(args, config, base, exported)
        write_checked_json(folder / "parity.json", parity.as_json())
        if config.export.merged:
            merge(trained, original, base, folder / "merged", settings=config.export, facts=facts)


def prove(
    args: argparse.Namespace, config: RunConfig, base: Checkpoint, adapter: Adapter
) -> Parity:
    """Reload the exported adapter with stock packages; raise `UserError` if it differs."""
    options = load_options(base, device=choose_device(), settings=config.model)
    model = load_adapter(load_base(base, **options), adapter)
    parity = compare_logits(
        model,
        args.finetune / "parity.safetensors",
        adapter=adapter,
        compute_dtype=options["compute_dtype"],
        device=model.device,
    )
    if not parity.passed:
        values = "its values are the same" if parity.identical_values else "its values differ"
        raise UserError(
            f"the exported adapter is not the trained one: {values}, logits differ by "
            f"{parity.rms_difference:.3g}, tolerance {parity.tolerance:.3g} (the adapter itself "
            f"moves them by {parity.adapter_effect:.3g}). Nothing is exported. If training ran "
            "with another model.compute_dtype or on another device type, run consolidate there."
        )
    logger.info(
        "reloaded adapter equals the trained one: the same values, logits differ by %.2g of %.3g "
        "(tolerance %.2g, adapter's effect %.3g)",
        parity.rms_difference,
        parity.rms_logit,
        parity.tolerance,
        parity.adapter_effect,
    )
    return parity


def merge(
    trained: Trained,
    original: Checkpoint,
    base: Checkpoint,
    folder: Path,
    *,
    settings: ExportConfig,
    facts: ConversationFacts,
) -> None:
    """Stream the merged model to `folder`, with the conversations of the training."""
    tensors = merged_model(*trained, original=original, base=base, onto=settings.merge_onto)
    num_bytes = write_merged(tensors, original, folder, settings=settings)
    replace_chat_template(folder, facts=facts)
    write_generation_config(original, folder, facts=facts)
    check_conversations(folder, facts.probes)
    write_checksums(folder)
    logger.info("merged onto %s weights: %.3f GiB", settings.merge_onto, num_bytes / 2**30)


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="finetune base model manifest output"))

"""Turn the sharded adapter into PEFT's files, and prove that they are the trained adapter.

Writes `adapter/` (adapter_model.safetensors, adapter_config.json, the tokenizer with its chat
template, generation_config.json, SHA256SUMS), `parity.json`, and on request `merged/`. If
the logits of the reloaded adapter differ from
the trained model's, or its tokenizer writes conversations differently, nothing is exported."""

import argparse
import logging
from itertools import chain
from pathlib import Path

import torch

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.converted_reader import ConvertedReader
from workflow.lib.checkpoints.decoder_layers import other_parts
from workflow.lib.checkpoints.expert_stacks import expert_stacks
from workflow.lib.checkpoints.files.stack_names import StackNames
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.export.adapter_files import (
    check_conversations,
    merged_tensors,
    read_sharded_adapter,
    replace_chat_template,
    write_generation_config,
    write_merged,
)
from workflow.lib.export.packed_stacks import merged_stacks, without_stacks
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.peft_folder import Trained, write_peft_folder
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model.backends import (
    choose_device,
    read_attention_needs,
    resolve_attention,
    resolve_dtype,
)
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.artifact_files import read_artifact
from workflow.lib.system.checksums import (
    RecordedFile,
    check_files,
    downloaded_files,
    listed_files,
    without_weights,
)
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import new_folder, write_checked_json, write_checksums
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    config = RunConfig.model_validate(args.config)
    facts = read_record(args.manifest, ConversationFacts)
    summary = read_record(args.finetune / "summary.json", Summary)
    trained = RecordedFile(args.finetune, "parity.safetensors", summary.parity_sha256)
    check_recorded([*listed_files(args.base), trained])
    check_files(without_weights(downloaded_files(args.model)))
    adapter = Trained(
        read_sharded_adapter(args.finetune / "adapter"),
        read_artifact(args.finetune / "adapter_config.json"),
    )
    with new_folder(args.output) as folder:
        names = write_peft_folder(
            adapter,
            folder / "adapter",
            config,
            model=args.model,
            base=args.base,
            facts=facts,
        )
        parity = prove(args, config, folder / "adapter", names=names)
        write_checked_json(folder / "parity.json", parity.as_json())
        if config.export.merged:
            merge(args, config, adapter, folder / "merged", facts=facts)


def prove(
    args: argparse.Namespace, config: RunConfig, adapter: Path, *, names: StackNames
) -> Parity:
    """Reload the exported adapter with stock packages; raise `UserError` if it differs."""
    device = choose_device()
    dtype = resolve_dtype(config.model.compute_dtype, device)
    base = load_base(
        args.base,
        device=device,
        compute_dtype=dtype,
        attention=resolve_attention(
            config.model.attention, device, read_attention_needs(args.base), compute_dtype=dtype
        ),
    )
    model = load_adapter(base, adapter)
    parity = compare_logits(
        model,
        args.finetune / "parity.safetensors",
        exported=adapter / ADAPTER_WEIGHTS,
        compute_dtype=dtype,
        device=model.device,
        trained_name=names.trained,
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
    args: argparse.Namespace,
    config: RunConfig,
    adapter: Trained,
    folder: Path,
    *,
    facts: ConversationFacts,
) -> None:
    """Stream the merged model to `folder`, with the conversations of the training."""
    model = build_on_meta(args.model, dtype=torch.bfloat16)
    stacks, onto = expert_stacks(model), config.export.merge_onto
    recorded = downloaded_files(args.model)
    others = other_parts(model)
    with (
        ConvertedReader(args.model, model, recorded=recorded) as original,
        CheckpointReader(args.base) as nf4,
    ):
        linears = merged_tensors(
            without_stacks(adapter.tensors, stacks), adapter.config,
            original=original, nf4=nf4, onto=onto, others=others,
        )  # fmt: skip
        experts = merged_stacks(*adapter, original=original, nf4=nf4, onto=onto, stacks=stacks)
        tensors = chain(linears, experts, original.untrained(others))
        num_bytes = write_merged(tensors, args.model, folder, settings=config.export)
    replace_chat_template(folder, facts=facts)
    write_generation_config(args.model, folder, facts=facts)
    check_conversations(folder, facts.probes)
    write_checksums(folder)
    logger.info("merged onto %s weights: %.3f GiB", config.export.merge_onto, num_bytes / 2**30)


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="base model manifest output")
    parser.add_argument("--finetune", type=Path, required=True, help="folder of the finetune stage")
    run(main, parser)

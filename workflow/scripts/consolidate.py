"""Turn the sharded adapter into PEFT's files, and prove that they are the adapter that was trained.

Writes `adapter/` (adapter_model.safetensors, adapter_config.json, SHA256SUMS), `parity.json`, and on
request `merged/`. If the logits of the reloaded adapter differ from the trained model's, nothing is exported.
"""

import argparse
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from workflow.lib.artifacts import provenance, put_in_place, read_json, write_checksums, write_json
from workflow.lib.config import RunConfig
from workflow.lib.errors import UserError
from workflow.lib.export import merged_tensors, read_sharded_adapter, save_adapter, write_merged
from workflow.lib.inference import (
    ADAPTER_WEIGHTS,
    choose_device,
    load_adapter,
    load_base,
    resolve_attention,
    resolve_dtype,
    softcaps_attention,
)
from workflow.lib.parity import compare_logits
from workflow.lib.weights import CheckpointReader
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    config = RunConfig.model_validate(args.config)
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    adapter = read_sharded_adapter(args.finetune / "adapter")
    adapter_config = read_json(args.finetune / "adapter_config.json") | {
        "base_model_name_or_path": config.model.source,
        "revision": config.model.revision,
    }
    save_adapter(adapter, adapter_config, partial / "adapter")

    parity = prove(args, config, partial / "adapter")
    write_json(partial / "parity.json", parity | {"provenance": provenance()})
    write_checksums(partial / "adapter")
    if config.export.merged:
        merge(args, config, adapter, adapter_config, partial / "merged")
    put_in_place(partial, args.output)


def prove(args: argparse.Namespace, config: RunConfig, adapter: Path) -> dict[str, Any]:
    """Reload the exported adapter with stock packages; return the parity record, or raise if it differs."""
    device = choose_device()
    dtype = resolve_dtype(config.model.compute_dtype, device)
    base = load_base(
        args.base,
        device=device,
        compute_dtype=dtype,
        attention=resolve_attention(
            config.model.attention,
            device,
            compute_dtype=dtype,
            softcapped=softcaps_attention(args.base),
        ),
    )
    model = load_adapter(base, adapter)
    parity = compare_logits(
        model, args.finetune / "parity.safetensors",
        exported=adapter / ADAPTER_WEIGHTS, compute_dtype=dtype, device=model.device,
    )  # fmt: skip
    if not parity["passed"]:
        values = "its values are the same" if parity["identical_values"] else "its values differ"
        raise UserError(
            f"the exported adapter is not the trained one: {values}, logits differ by {parity['max_abs_difference']:.3g}, "
            f"tolerance {parity['tolerance']:.3g} (the adapter itself moves them by {parity['adapter_effect']:.3g}). "
            "Nothing is exported. If training ran with another model.compute_dtype or on another device type, "
            "run consolidate there."
        )
    logger.info(
        "reloaded adapter equals the trained one: the same values, logits within %.2g of %.3g (tolerance %.2g, adapter's effect %.3g)",
        parity["max_abs_difference"], parity["max_abs_logit"], parity["tolerance"], parity["adapter_effect"],
    )  # fmt: skip
    return parity


def merge(
    args: argparse.Namespace,
    config: RunConfig,
    adapter: dict[str, torch.Tensor],
    adapter_config: dict[str, Any],
    folder: Path,
) -> None:
    """Stream the merged model to `folder`."""
    with CheckpointReader(args.model) as original, CheckpointReader(args.base) as nf4:
        tensors = merged_tensors(
            adapter, adapter_config, original=original, nf4=nf4, onto=config.export.merge_onto
        )
        num_bytes = write_merged(tensors, args.model, folder, settings=config.export)
    write_checksums(folder)
    logger.info("merged onto %s weights: %.3f GiB", config.export.merge_onto, num_bytes / 2**30)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--finetune", type=Path, required=True, help="folder of the finetune stage")
    parser.add_argument("--base", type=Path, required=True, help="folder of the NF4 base")
    parser.add_argument("--model", type=Path, required=True, help="folder of the original model")
    parser.add_argument("--output", type=Path, required=True, help="folder of the exported files")
    run(main, parser)

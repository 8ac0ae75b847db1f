"""Quantize a base checkpoint to NF4 once, tensor by tensor, for all runs that use it.

Reads a model folder (config.json, safetensors, tokenizer); writes the same model as a pre-quantized
bitsandbytes checkpoint that stock Transformers loads, and `quantization.json` (sizes, settings,
provenance).
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.model.quantize import (
    SHARD_BYTES,
    ShardWriter,
    check_checkpoint,
    copy_companions,
    nf4_config,
    quantizable_linears,
    quantized_tensors,
    read_model_config,
)
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.checksums import check_files, downloaded_files, without_weights
from workflow.lib.system.files import provenance, put_in_place, write_checksums, write_json
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    settings = QuantizeConfig.model_validate(args.config["quantize"])
    check_files(without_weights(downloaded_files(args.model)))
    config = read_model_config(args.model)
    model = build_on_meta(args.model, dtype=torch.bfloat16)
    linears = quantizable_linears(model)
    with CheckpointReader(args.model) as reader:
        check_checkpoint(model, linears, reader)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    total_bytes = write_weights(args.model, partial, linears, settings, device)
    copy_companions(args.model, partial)
    write_json(partial / "config.json", nf4_config(config, settings))
    num_weights = sum(out * inp for out, inp in linears.values())
    facts = {
        "quantized_linears": len(linears),
        "quantized_parameters": num_weights,
        "total_bytes": total_bytes,
        "settings": settings.model_dump(mode="json"),
        "device": device.type,
        "provenance": provenance(),
    }
    write_json(partial / "quantization.json", facts)
    write_checksums(partial)
    put_in_place(partial, args.output)
    logger.info(
        "quantized %d linears (%s parameters) to NF4 on %s: %.3f GiB",
        len(linears), f"{num_weights:,}", device.type, total_bytes / 2**30,
    )  # fmt: skip


def write_weights(
    source: Path,
    target: Path,
    linears: dict[str, tuple[int, int]],
    settings: QuantizeConfig,
    device: torch.device,
) -> int:
    """Stream every tensor from `source` to `target`; return the bytes written."""
    writer = ShardWriter(target, shard_bytes=SHARD_BYTES)
    with CheckpointReader(source, recorded=downloaded_files(source)) as reader:
        tensors = quantized_tensors(reader, linears, settings, device=device)
        count = len(reader.names())
        for _, parts in tqdm(
            tensors, total=count, desc="quantize", unit="tensor", disable=None, file=sys.stderr
        ):
            writer.add(parts)
    writer.close()
    return writer.total_bytes


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the original model")
    parser.add_argument("--output", type=Path, required=True, help="folder of the NF4 model")
    run(main, parser)

"""Quantize a base checkpoint to NF4 once, for all runs that use it.

Reads a model folder (config.json, safetensors, tokenizer), and the tokens of a run if they
calibrate; writes the same model as a pre-quantized bitsandbytes checkpoint that stock Transformers
loads, and `quantization.json` (method, sizes, errors, settings, provenance). A stopped calibration
resumes."""

import argparse
import math
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from workflow.lib.artifacts.records import CalibrationFacts, Provenance, Quantization
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.loading import check_loading
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore, recorded_arrays
from workflow.lib.model.backends import choose_device, resolve_dtype
from workflow.lib.planning.model_sizes import Method, chosen_method
from workflow.lib.quantization.calibrated_base import CalibrationInputs, write_calibrated
from workflow.lib.quantization.nf4_checkpoint import (
    SHARD_BYTES,
    ShardWriter,
    check_model,
    check_taken,
    copy_companions,
    modules_in_16_bits,
    nf4_config,
    only_here,
    quantizable_linears,
    quantized_tensors,
)
from workflow.lib.quantization.nf4_codes import check_blocks
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.checksums import check_files
from workflow.lib.system.files import (
    file_sha256,
    package_versions,
    replace_folder,
    short_hash,
    write_checked_json,
    write_checksums,
    write_json,
)
from workflow.lib.system.input_files import Inputs
from workflow.scripts.command import logger, run, stage_parser

# Fingerprint of an unfinished base's files.
BEGUN_WITH = "begun_with.txt"
TAKEN: tuple[Method, str] = ("absmax", "model.source is in NF4 already: its bytes are taken")


def main(args: argparse.Namespace) -> None:
    settings = QuantizeConfig.model_validate(args.config["quantize"])
    text = settings.calibration_text
    inputs = Inputs([args.model, *([Path(text)] if text else [])])
    original = Checkpoint.open(args.model)
    model, stacks = original.model, original.stacks
    linears = quantizable_linears(model)
    check_model(model, linears)
    with original.weights() as reader:
        check_loading(reader)
        taken = check_taken(reader, linears, stacks, settings)
        packed = bool(reader.packed or original.stated_quantization)
    check_blocks(stacks, settings)
    shapes = [*linears.values(), *(stack.shape for stack in stacks.values())]
    method, reason = TAKEN if taken else chosen_method(settings.method, shapes)
    if reason is not None:
        logger.info("%s: %s", method, reason)
    device = choose_device()
    partial = args.output.with_name(f".{args.output.name}.partial")
    if method == "calibrated":
        total_bytes, calibration, hashes = calibrated(args, partial, original, settings, device)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        calibration = None
        total_bytes, hashes = write_weights(original, partial, settings, device)
    copy_companions(args.model, partial)
    in_16_bits = modules_in_16_bits(model)
    write_json(
        partial / "config.json", nf4_config(original.plain_config, settings, in_16_bits=in_16_bits)
    )
    num_weights = sum(math.prod(shape) for shape in shapes)
    facts = {} if calibration is None else {"calibration": calibration}
    record = Quantization(
        quantized_linears=len(linears),
        quantized_stacks=len(stacks),
        quantized_parameters=num_weights,
        total_bytes=total_bytes,
        settings=settings.model_dump(mode="json"),
        method=method,
        method_reason=reason,
        device=device.type,
        auto_class=auto_class(model.config).__name__,
        in_16_bits=in_16_bits,
        taken=taken,
        only_here=(
            None if taken else only_here(method, settings, stacks=bool(stacks), packed=packed)
        ),
        **facts,
        model_files=hashes,
        provenance=Provenance.now(),
    )
    write_checked_json(partial / "quantization.json", record.as_json())
    write_checksums(partial)
    inputs.check()
    replace_folder(partial, args.output)
    logger.info(
        "quantized %d linears and %d stacks of experts (%s parameters) to NF4 (%s) on %s: %.3f GiB",
        len(linears), len(stacks), f"{num_weights:,}", method, device.type,
        total_bytes / 2**30,
    )  # fmt: skip


def calibrated(
    args: argparse.Namespace,
    partial: Path,
    original: Checkpoint,
    settings: QuantizeConfig,
    device: torch.device,
) -> tuple[int, CalibrationFacts, dict[str, str]]:
    """Write the calibrated weights to `partial`, resuming from its files; return their bytes, the
    facts for `quantization.json`, and the SHA-256 of each file that was read."""
    store = TokenStore.open(args.tokens)
    check_files(recorded_arrays(args.tokens, store.manifest))
    text = settings.calibration_text
    files = sorted(path for path in args.model.iterdir() if path.is_file())
    begun_with = short_hash(
        [
            settings.model_dump(mode="json"),
            [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
            file_sha256(args.tokens / MANIFEST),
            text and file_sha256(Path(text)),
            device.type,
            package_versions(),
        ]
    )
    mark = partial / BEGUN_WITH
    if not mark.is_file() or mark.read_text() != begun_with:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        mark.write_text(begun_with)
    with original.weights(recorded=True, finite=True) as reader:
        linears, dtype = quantizable_linears(original.model), resolve_dtype("auto", device)
        inputs = CalibrationInputs(original, reader, store, linears, device, dtype)
        total_bytes, facts = write_calibrated(partial, inputs, settings, fingerprint=begun_with)
    mark.unlink()
    return total_bytes, facts, reader.sha256()


def write_weights(
    source: Checkpoint, target: Path, settings: QuantizeConfig, device: torch.device
) -> tuple[int, dict[str, str]]:
    """Stream all tensors from `source` to `target` by the model's names; return their bytes, and
    the SHA-256 of each file that was read."""
    writer = ShardWriter(target, shard_bytes=SHARD_BYTES)
    linears = quantizable_linears(source.model)
    with source.weights(recorded=True, finite=True) as reader:
        tensors = quantized_tensors(reader, linears, settings, device=device, stacks=source.stacks)
        count = len(reader.names())
        for _, parts in tqdm(
            tensors, total=count, desc="quantize", unit="tensor", disable=None, file=sys.stderr
        ):
            writer.add(parts)
    writer.close()
    return writer.total_bytes, reader.sha256()


def parser() -> argparse.ArgumentParser:
    return stage_parser(__doc__, needs="model output", takes="tokens")


if __name__ == "__main__":
    run(main, parser())

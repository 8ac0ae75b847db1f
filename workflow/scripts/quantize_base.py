"""Make the frozen base of a checkpoint once, for all runs that use it: in NF4, or in 16 bits.

Reads a model folder (config.json, safetensors, tokenizer), the tokens of a run if they calibrate,
and preflight's decision with `quantize.keep: auto`; writes the same model as a pre-quantized
bitsandbytes checkpoint that stock Transformers loads, and `quantization.json` (method, sizes,
errors, settings, provenance). A stopped calibration resumes."""

import argparse
import math
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import CalibrationFacts, Provenance, Quantization
from workflow.lib.checkpoints.checkpoint import Checkpoint, check_loading
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore, recorded_arrays
from workflow.lib.data.tokens.work_folder import BEGUN_WITH, begin_shards
from workflow.lib.model.backends import choose_device, resolve_dtype
from workflow.lib.planning.model_sizes import Method, chosen_method
from workflow.lib.quantization.calibrated_base import CalibrationInputs, write_calibrated
from workflow.lib.quantization.nf4_checkpoint import (
    SHARD_BYTES,
    BaseWeights,
    ShardWriter,
    base_config,
    check_taken,
    copy_companions,
    only_here,
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
TAKEN: tuple[Method, str] = ("absmax", "model.source is in NF4 already: its bytes are taken")


def main(args: argparse.Namespace) -> None:
    settings = QuantizeConfig.model_validate(args.config["quantize"])
    if settings.measures:
        settings = settings.keeping(read_record(args.preflight, Preflight).plan.kept)
    text = settings.calibration_text
    inputs = Inputs([args.model, *([Path(text)] if text else [])])
    original = Checkpoint.open(args.model)
    weights = BaseWeights.of(original.model, settings)
    with original.weights() as reader:
        check_loading(reader)
        taken = check_taken(reader, weights, settings)
        packed = bool(reader.packed or original.stated_quantization)
    check_blocks(weights.stacks, settings)
    method, reason = TAKEN if taken else chosen_method(settings.method, weights.shapes)
    if not weights.shapes:
        method, reason = "none", None
    if reason is not None:
        logger.info("%s: %s", method, reason)
    device = choose_device()
    partial = args.output.with_name(f".{args.output.name}.partial")
    if method == "calibrated":
        total_bytes, calibration, hashes = calibrated(
            args, partial, original, weights, settings, device
        )
    else:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        calibration = None
        total_bytes, hashes = write_weights(original, partial, weights, settings, device)
    copy_companions(args.model, partial)
    write_json(partial / "config.json", base_config(original.plain_config, settings, weights))
    num_weights = sum(math.prod(shape) for shape in weights.shapes)
    facts = {} if calibration is None else {"calibration": calibration}
    record = Quantization(
        quantized_linears=len(weights.linears),
        quantized_stacks=len(weights.stacks),
        quantized_parameters=num_weights,
        kept=len(weights.kept),
        total_bytes=total_bytes,
        settings=settings.model_dump(mode="json"),
        method=method,
        method_reason=reason,
        device=device.type,
        auto_class=auto_class(original.model.config).__name__,
        in_16_bits=weights.in_16_bits,
        taken=taken,
        only_here=(
            None
            if taken or method == "none"
            else only_here(method, settings, stacks=bool(weights.stacks), packed=packed)
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
        "quantized %d linears and %d stacks of experts (%s parameters) to NF4 (%s) on %s, kept %d "
        "in 16 bits: %.3f GiB",
        len(weights.linears), len(weights.stacks), f"{num_weights:,}", method, device.type,
        len(weights.kept),
        total_bytes / 2**30,
    )  # fmt: skip


def calibrated(
    args: argparse.Namespace,
    partial: Path,
    original: Checkpoint,
    weights: BaseWeights,
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
    begin_shards(partial, key=begun_with)
    with original.weights(recorded=True, finite=True) as reader:
        dtype = resolve_dtype("auto", device)
        inputs = CalibrationInputs(original, reader, store, weights, device, dtype)
        total_bytes, facts = write_calibrated(partial, inputs, settings, fingerprint=begun_with)
    (partial / BEGUN_WITH).unlink()
    return total_bytes, facts, reader.sha256()


def write_weights(
    source: Checkpoint,
    target: Path,
    weights: BaseWeights,
    settings: QuantizeConfig,
    device: torch.device,
) -> tuple[int, dict[str, str]]:
    """Stream all tensors from `source` to `target` by the model's names; return their bytes, and
    the SHA-256 of each file that was read."""
    writer = ShardWriter(target, shard_bytes=SHARD_BYTES)
    with source.weights(recorded=True, finite=True) as reader:
        tensors = quantized_tensors(reader, weights, settings, device=device)
        count = len(reader.names())
        for _, parts in tqdm(
            tensors, total=count, desc="quantize", unit="tensor", disable=None, file=sys.stderr
        ):
            writer.add(parts)
    writer.close()
    return writer.total_bytes, reader.sha256()


def parser() -> argparse.ArgumentParser:
    return stage_parser(__doc__, needs="model output", takes="tokens preflight")


if __name__ == "__main__":
    run(main, parser())

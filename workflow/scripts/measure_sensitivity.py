"""Measure what 4 bits cost of the loss, by linear and stack of experts (`quantize.keep: auto`).

Reads the original model, and texts: training rows, `quantize.calibration_text`, and the shipped
texts of other kinds. A model passes layer by layer through the memory. Preflight chooses the kept
linears from the written file, again for another GPU or rank without another measurement."""

import argparse
from pathlib import Path

import torch

from workflow.lib.artifacts.records import Provenance, Sensitivities
from workflow.lib.checkpoints.checkpoint import Checkpoint, check_loading
from workflow.lib.checkpoints.tokenizer import num_usable_tokens
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.evaluation.other_texts import OtherTexts
from workflow.lib.model.backends import choose_device, resolve_dtype
from workflow.lib.quantization.layer_stream import LayerStream
from workflow.lib.quantization.nf4_checkpoint import BaseWeights, check_measured
from workflow.lib.quantization.nf4_codes import check_blocks
from workflow.lib.quantization.sensitivity import (
    Texts,
    measured_costs,
    other_texts,
    own_texts,
    predicted_tokens,
)
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.checksums import check_files
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.input_files import Inputs
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = QuantizeConfig.model_validate(args.config["quantize"])
    text = settings.calibration_text
    inputs = Inputs([args.model, *([Path(text)] if text else [])])
    original = Checkpoint.open(args.model)
    weights = BaseWeights.of(original.model, settings)
    check_blocks(weights.stacks, settings)
    store = TokenStore.open(args.tokens)
    check_files(recorded_arrays(args.tokens, store.manifest))
    device = choose_device()
    texts = texts_of(original, store, settings, device)
    tokens = predicted_tokens(texts)
    counts = ", ".join(f"{kind} {count:,}" for kind, count in tokens.items())
    logger.info("measuring %d linears and stacks on tokens: %s", len(weights.shapes), counts)
    with original.weights(recorded=True, finite=True) as reader:
        check_loading(reader)
        check_measured(reader, weights)
        stream = LayerStream(original, reader, device=device, dtype=resolve_dtype("auto", device))
        paths = {*weights.linears, *weights.stacks}
        nats = measured_costs(stream, texts, paths, settings)
        hashes = reader.sha256()
    record = Sensitivities(
        tokens=tokens,
        nats=nats,
        model_files=hashes,
        device=device.type,
        provenance=Provenance.now(),
    )
    inputs.check()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_checked_json(args.output, record.as_json())
    for kind, costs in nats.items():
        logger.info("4 bits cost an estimated %.4f nats a token of %s", sum(costs.values()), kind)


def texts_of(
    original: Checkpoint, store: TokenStore, settings: QuantizeConfig, device: torch.device
) -> Texts:
    """Return the user's texts, and the shipped ones."""
    tokenizer = original.tokenizer()
    usable = num_usable_tokens(tokenizer, original.folder)
    shipped = OtherTexts.of(tokenizer, seq_len=store.seq_len, usable_tokens=usable)
    own = own_texts(settings, store, original, device=device)
    return own | other_texts(shipped.documents, shipped.kinds, device=device)


def parser() -> argparse.ArgumentParser:
    return stage_parser(__doc__, needs="model tokens output")


if __name__ == "__main__":
    run(main, parser())

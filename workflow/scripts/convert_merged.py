"""Write the merged model in another format (`--form`), and compare two readers of it.

Stock Transformers opens the files by the format's own package; the evaluation decodes them itself.
Both must give the same loss on held-out documents, else nothing is exported. Writes the model's
folder `--output`, and the comparison."""

import argparse
import gc
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Parity, Provenance, ReaderCheck
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents, recorded_arrays
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.conversions import convert
from workflow.lib.export.stock_models import load_base, load_options, load_stock
from workflow.lib.model.backends import choose_device
from workflow.lib.settings.config import ExportConfig, ModelConfig
from workflow.lib.settings.forms import CONVERTED
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import new_folder, write_checked_json
from workflow.lib.system.number_formats import size
from workflow.scripts.command import logger, run, stage_parser

DOCUMENTS, SEED = 64, 0


def main(args: argparse.Namespace) -> None:
    store = TokenStore.open(args.tokens)
    check_recorded([*listed_files(args.merged), *recorded_arrays(args.tokens, store.manifest)])
    device, merged = choose_device(), Checkpoint(args.merged)
    settings = ModelConfig.model_validate(args.config["model"])
    options = load_options(merged, device=device, settings=settings)
    shard_gib = ExportConfig.model_validate(args.config["export"]).shard_gib
    with new_folder(args.output) as folder:
        shard_bytes = int(shard_gib * 2**30)
        convert(args.form, merged, folder, shard_bytes=shard_bytes, device=device)
        check = compared(args, Checkpoint(folder), store, options)
        if not check.worst_document <= check.bound:
            raise UserError(
                f"export.{args.form}: {check.summary}, and {check.bound:.2g} are allowed. Nothing "
                f"is exported. Leave out export.{args.form}, or take another compute_dtype."
            )
    write_checked_json(args.comparison, check.as_json())
    logger.info("%s: %s; %s", args.output, size(check.bytes), check.summary)


def load_as_user(form: str, made: Checkpoint, **options: Any) -> PreTrainedModel:
    try:
        return load_stock(made, **options)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"export.{form}: stock Transformers does not read it of this model "
            f"({' '.join(str(error).split())}). Nothing is exported. Leave out export.{form}."
        ) from error


def compared(
    args: argparse.Namespace, made: Checkpoint, store: TokenStore, options: dict[str, Any]
) -> ReaderCheck:
    """Return the losses of held-out documents by stock Transformers and by the evaluation."""
    documents = store.heldout_documents()
    chosen = choose_documents(documents, at_most=DOCUMENTS, seed=SEED)
    losses = []
    for load in (partial(load_as_user, args.form), load_base):
        model = load(made, **options)
        how: Any = {"batch_size": 1, "device": model.device}
        losses.append(heldout_losses(model, [documents[number] for number in chosen], **how))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    stock, decoded = losses
    tokens = sum(count for _, count in stock)
    apart = [abs(a - b) / count for (a, count), (b, _) in zip(stock, decoded, strict=True)]
    parity = read_record(args.parity, Parity)
    return ReaderCheck(
        form=args.form,
        bytes=sum(path.stat().st_size for path in made.files),
        documents=len(chosen),
        tokens=tokens,
        loss=sum(loss for loss, _ in stock) / tokens,
        decoded_loss=sum(loss for loss, _ in decoded) / tokens,
        worst_document=max(apart),
        bound=2 * parity.tolerance,
        compute_dtype=str(options["compute_dtype"]).removeprefix("torch."),
        provenance=Provenance.now(),
    )


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="merged parity tokens output comparison")
    parser.add_argument("--form", choices=CONVERTED, required=True, help="the format")
    run(main, parser)

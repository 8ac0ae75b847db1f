"""The stage that serves what is exported, on what `llama_cpp_model.prepare` has made."""

import argparse

import torch

from tests.support.report_examples import evaluation, parity
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ServedCheck
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.parity import RELATIVE_TOLERANCE
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.settings.forms import EXPORTS, FORMS
from workflow.lib.system.files import write_checked_json
from workflow.scripts.check_served import main

CPU = torch.device("cpu")


def stock(folder, form, *, dtype=torch.float32):
    weights, *adapter = FORMS[form].parts
    options = {"device": CPU, "compute_dtype": dtype, "attention": "sdpa"}
    model = load_base(Checkpoint(folder / weights), **options)
    return load_adapter(model, Adapter(folder / "adapter")) if adapter else model


def evaluate(folder, form, output, *, dtype=torch.float32):
    """Write to `output` what the evaluation of a form, and the parity of its export, would be."""
    documents = TokenStore.open(folder / "tokens").heldout_documents()
    model = stock(folder, form, dtype=dtype)
    losses = heldout_losses(model, documents, batch_size=4, device=CPU)
    tokens = sum(count for _, count in losses)
    ids = torch.tensor(documents[0][0].astype("int64"))[None]
    heldout = {
        "loss": sum(total for total, _ in losses) / tokens,
        "loss_ci95": [0.0, 9.0],
        "perplexity": 1.0,
        "documents": len(losses),
        "trained_tokens": tokens,
        "sources": {},
        "per_document": [
            {"document": n, "source": "s", "loss_sum": total, "tokens": count}
            for n, (total, count) in enumerate(losses)
        ],
    }
    found = evaluation("demo", "base") | {
        "subject": form,
        "heldout": heldout,
        "samples": [{"document": 0, "prompt": "", "reference": "", "answer": ""}],
    }
    write_checked_json(output / f"{form}.json", found)
    rms = float(model(input_ids=ids).logits.detach().square().mean().sqrt())
    name = str(dtype).removeprefix("torch.")
    checked = parity() | {"tolerance": RELATIVE_TOLERANCE[dtype] * rms, "compute_dtype": name}
    write_checked_json(output / "parity.json", checked)


def check(folder, form, output, *, dtype=torch.float32, **server):
    """Run the stage on a form; server: `python` of vLLM, or `gguf`, the folder of its files."""
    evaluate(folder, form, output, dtype=dtype)
    own = {form: folder / form} if form in EXPORTS else {}
    main(
        argparse.Namespace(
            config={
                "evaluate": {"max_new_tokens": 6, "served": form},
                "model": {"compute_dtype": str(dtype).removeprefix("torch.")},
            },
            model=folder / "model",
            adapter=folder / "adapter",
            parity=output / "parity.json",
            evaluation=output,
            tokens=folder / "tokens",
            output=output / "served.json",
            **({"gguf": None, "python": None} | own | server),
        )
    )
    return read_record(output / "served.json", ServedCheck)

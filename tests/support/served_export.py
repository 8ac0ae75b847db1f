"""The stage that serves what is exported, on what `llama_cpp_model.prepare` has made."""

import argparse

import torch

from tests.support.report_examples import evaluation, parity
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ServedCheck
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.parity import RELATIVE_TOLERANCE
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.system.files import write_checked_json
from workflow.scripts.check_served import main

CPU = torch.device("cpu")


def stock(folder, form):
    model = load_base(
        folder / ("merged" if form == "merged" else "model"),
        device=CPU,
        compute_dtype=torch.float32,
        attention="sdpa",
    )
    return (
        model
        if form in ("merged", "original")
        else load_adapter(model, Adapter(folder / "adapter"))
    )


def evaluate(folder, form, output):
    """Write to `output` what the evaluation of a form, and the parity of its export, would be."""
    documents = TokenStore.open(folder / "tokens").heldout_documents()
    model = stock(folder, form)
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
    tolerance = RELATIVE_TOLERANCE[torch.float32] * rms
    checked = parity() | {"tolerance": tolerance, "compute_dtype": "float32"}
    write_checked_json(output / "parity.json", checked)


def check(folder, form, output, **server):
    """Run the stage on a form; server: `python` of vLLM, or `gguf`, the folder of its files."""
    evaluate(folder, form, output)
    main(
        argparse.Namespace(
            config={"evaluate": {"max_new_tokens": 6, "served": form}, "model": {}},
            python=server.get("python"),
            gguf=server.get("gguf"),
            model=folder / "model",
            merged=folder / "merged" if form == "merged" else None,
            adapter=folder / "adapter",
            parity=output / "parity.json",
            evaluation=output,
            tokens=folder / "tokens",
            output=output / "served.json",
        )
    )
    return read_record(output / "served.json", ServedCheck)

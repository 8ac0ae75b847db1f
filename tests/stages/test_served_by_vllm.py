"""The real vLLM serves adapter and merged model as Transformers and PEFT compute them, and what it
does otherwise is noticed. It needs the environment of `make serving`."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.llama_cpp_model import prepare
from tests.support.shared import made_once
from workflow.lib.artifacts.layout import SERVING
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.served_record import ServedCheck
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.parity import RELATIVE_TOLERANCE
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import provenance, write_checked_json
from workflow.scripts.check_served import main

CPU = torch.device("cpu")
# One rank and one scale: of others vLLM 0.32 takes none, and says nothing.
PLAIN: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}

pytestmark = pytest.mark.skipif(
    not Path(SERVING).exists(), reason=f"vLLM has no environment ({SERVING}); make serving"
)


def stock(folder, form):
    model = load_base(
        folder / ("merged" if form == "merged" else "model"),
        device=CPU,
        compute_dtype=torch.float32,
        attention="sdpa",
    )
    return model if form == "merged" else load_adapter(model, folder / "adapter")


def evaluate(folder, form):
    """Write what the evaluation of a form, and the parity of its export, would be."""
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
    sample = {"document": 0, "prompt": "", "reference": "", "answer": "", "drawn": None}
    found = {
        "subject": form,
        "run": "demo",
        "served": True,
        "heldout": heldout,
        "tasks": {},
        "samples": [sample],
        "comparisons": {},
        "provenance": provenance(),
    }
    write_checked_json(folder / "evaluate_run" / f"{form}.json", found)
    rms = float(model(input_ids=ids).logits.square().mean().sqrt())
    parity = {
        "passed": True,
        "identical_values": True,
        "rms_difference": 0.0,
        "tolerance": RELATIVE_TOLERANCE[torch.float32] * rms,
        "relative_tolerance": RELATIVE_TOLERANCE[torch.float32],
        "rms_logit": rms,
        "adapter_effect": 1.0,
        "argmax_agreement": 1.0,
        "rows": 1,
        "positions": 1,
        "compute_dtype": "float32",
        "reference": "",
        "reloaded": "",
        "provenance": provenance(),
    }
    write_checked_json(folder / "parity.json", parity)


def check(folder, form):
    evaluate(folder, form)
    main(
        argparse.Namespace(
            config={"evaluate": {"max_new_tokens": 6}, "model": {}},
            python=Path(SERVING),
            served=form,
            model=folder / "model",
            merged=folder / "merged" if form == "merged" else None,
            adapter=folder / "adapter",
            parity=folder / "parity.json",
            evaluation=folder / "evaluate_run",
            tokens=folder / "tokens",
            output=folder / "served.json",
        )
    )
    return read_record(folder / "served.json", ServedCheck)


@pytest.fixture
def exported(shared_folder):
    return made_once(shared_folder / "for-vllm", lambda folder: prepare(folder, **PLAIN))


@pytest.mark.parametrize("form", ["tuned_on_original", "merged"])
def test_vllm_serves_what_is_exported(exported, form):
    found = check(exported, form)
    assert found.worst_document < found.bound
    assert found.prompts >= 2
    assert [part.part for part in found.parts] == (
        [] if form == "merged" else ["adapter", "mlp", "self_attn"]
    )
    assert all(part.share == pytest.approx(1.0, abs=0.01) for part in found.parts)


def test_scale_that_vllm_does_not_know_is_noticed(tmp_path):
    prepare(tmp_path, **(PLAIN | {"alpha_pattern": {"down_proj": 6}}))
    with pytest.raises(UserError, match=r"gives held-out tokens .* serves another model"):
        check(tmp_path, "tuned_on_original")


def test_dora_is_refused_in_the_words_of_vllm(tmp_path):
    prepare(tmp_path, **PLAIN, use_dora=True)
    with pytest.raises(UserError, match=r"refuses /v1/load_lora_adapter: .*DoRA.* Set export\.m"):
        check(tmp_path, "tuned_on_original")

"""The real vLLM serves adapter and merged model as Transformers and PEFT compute them, and what it
does otherwise is noticed. It needs the environment of `make serving`."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.llama_cpp_model import prepare
from tests.support.report_examples import evaluation, parity
from tests.support.shared import made_once
from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.layout import SERVING
from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.served_record import ServedCheck
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.evaluation.served_checks import Asked, Comparison, ask, check_prompts, write_parts
from workflow.lib.evaluation.vllm_server import Start, vllm_server
from workflow.lib.export.parity import RELATIVE_TOLERANCE
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.scripts.check_served import main

CPU = torch.device("cpu")

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


def check(folder, form, output):
    evaluate(folder, form, output)
    main(
        argparse.Namespace(
            config={"evaluate": {"max_new_tokens": 6}, "model": {}},
            python=Path(SERVING),
            served=form,
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


@pytest.fixture
def exported(shared_folder):
    """A folder with an adapter of two ranks and two scales."""
    return made_once(shared_folder / "for-vllm", prepare)


@pytest.mark.parametrize("form", ["tuned_on_original", "merged"])
def test_vllm_serves_what_is_exported(exported, form, tmp_path):
    found = check(exported, form, tmp_path)
    assert found.worst_document < found.bound
    assert found.prompts >= 2
    assert [part.part for part in found.parts] == (
        [] if form == "merged" else ["adapter", "mlp", "self_attn"]
    )
    assert all(part.share == pytest.approx(1.0, abs=0.01) for part in found.parts)


def test_kind_of_module_and_template_that_vllm_serves_otherwise_are_noticed(exported, tmp_path):
    """It is given the adapter without its MLPs, and another template."""
    evaluate(exported, "tuned_on_original", tmp_path)
    found = read_record(tmp_path / "tuned_on_original.json", Evaluation)
    documents = TokenStore.open(exported / "tokens").heldout_documents()
    asked = Asked.of(found, documents, folder=exported / "adapter", most=6)
    parts = write_parts(exported / "adapter", tmp_path / "parts")
    other = shutil.copytree(exported / "adapter", tmp_path / "other")
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"dtype": "float32", "max_tokens": asked.longest, "max_lora_rank": 8, "gpus": 0}
    with vllm_server(
        Start(python=Path(SERVING), model=exported / "model", tokenizer=other, **options)
    ) as server:
        for part in parts:
            server.load_adapter(part, parts["self_attn"])
        said = ask(server, asked, parts)
        probes = read_record(exported / "tokens" / "manifest.json", ConversationFacts).probes
        with pytest.raises(UserError, match=r"vLLM writes a conversation .* and Transformers as"):
            check_prompts(server, load_tokenizer(exported / "adapter"), probes)
    comparison = Comparison("vLLM", asked, said, bound=1e-3)
    with pytest.raises(UserError, match=r"gives held-out tokens .* serves another model"):
        comparison.worst_document()
    model = stock(exported, "tuned_on_original")
    with pytest.raises(UserError, match="does not apply the adapter of mlp alone as PEFT does"):
        comparison.parts(model, parts)


def test_dora_is_refused_in_the_words_of_vllm(tmp_path):
    prepare(tmp_path, use_dora=True)
    with pytest.raises(UserError, match=r"refuses /v1/load_lora_adapter: .*DoRA.* Set export\.m"):
        check(tmp_path, "tuned_on_original", tmp_path / "measured")

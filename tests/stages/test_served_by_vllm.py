"""The real vLLM serves adapter and merged model as Transformers and PEFT compute them, and what it
does otherwise is noticed. It needs the environment of `make serving`."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.finished import save_tokens
from tests.support.llama_cpp_model import add_companions, prepare, prepare_mixture, random_adapter
from tests.support.served_export import check, evaluate, stock
from tests.support.shared import made_once
from tests.support.smollm2 import smollm2
from tests.support.tiny_export import write_formats
from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.layout import SERVING
from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.model_server import running
from workflow.lib.evaluation.sample_answers import choose_prompts
from workflow.lib.evaluation.served_checks import (
    ADAPTER,
    Comparison,
    Reference,
    ServerQuestions,
    ask,
    check_prompts,
    log_p,
    log_p_of,
)
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart
from workflow.lib.settings.forms import FORMS, TRAINED
from workflow.lib.system.errors import UserError

SWEEP = {
    "r4": {"r": 4, "rank_pattern": {}},
    "r16": {"r": 16},
    "attention": {"target_modules": ["q_proj", "v_proj"]},
}
VLLM = {"python": Path(SERVING)}

pytestmark = pytest.mark.skipif(
    not Path(SERVING).exists(), reason=f"vLLM has no environment ({SERVING}); make serving"
)


@pytest.fixture
def exported(shared_folder):
    """A folder with an adapter of two ranks and two scales."""

    def prepare_all(folder):
        prepare(folder)
        write_formats(folder)

    return made_once(shared_folder / "for-vllm", prepare_all)


@pytest.mark.parametrize("form", [form for form in TRAINED if FORMS[form].vllm])
def test_vllm_serves_what_is_exported(exported, form, tmp_path):
    dtype = getattr(torch, FORMS[form].vllm[0])
    found = check(exported, form, tmp_path, dtype=dtype, **VLLM)
    assert found.worst_document < found.bound
    assert found.prompts >= 2
    if FORMS[form].adapter is None:
        assert found.adapter is None
    else:
        assert found.adapter.share == pytest.approx(1.0, abs=0.01)


def test_adapter_and_template_that_vllm_serves_otherwise_are_noticed(exported, tmp_path):
    """It is given the adapter with its MLPs zeroed, and another template."""
    evaluate(exported, "tuned_on_original", tmp_path)
    found = read_record(tmp_path / "tuned_on_original.json", Evaluation)
    documents = TokenStore.open(exported / "tokens").heldout_documents()
    prompts = choose_prompts(documents, [0], count=1, seed=0)
    how = {"prompts": prompts, "folder": exported / "adapter", "most": 6}
    questions = ServerQuestions.of(documents, range(len(documents)), **how)
    partial = shutil.copytree(exported / "adapter", tmp_path / "partial")
    tensors = load_file(partial / "adapter_model.safetensors")
    zeroed = {name: tensor * (".mlp." not in name) for name, tensor in tensors.items()}
    save_file(zeroed, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    other = shutil.copytree(exported / "adapter", tmp_path / "other")
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"dtype": "float32", "max_tokens": questions.longest, "adapter": {"r": 8}, "gpus": 0}
    start = VllmStart(Path(SERVING), exported / "model", tokenizer=other, **options)
    with running(VllmServer, start) as server:
        server.load_adapter(ADAPTER, partial)
        results = ask(server, questions, served=ADAPTER)
        probes = read_record(exported / "tokens" / "manifest.json", ConversationFacts).probes
        with pytest.raises(UserError, match=r"vLLM writes a conversation .* and Transformers as"):
            check_prompts(server, load_tokenizer(exported / "adapter"), probes)
    comparison = Comparison("vLLM", questions, Reference.of(found, questions), results, bound=1e-3)
    with pytest.raises(UserError, match=r"gives held-out tokens .* serves another model"):
        comparison.worst_document()
    model = stock(exported, "tuned_on_original")
    with pytest.raises(UserError, match="does not apply the adapter as PEFT does"):
        comparison.adapter_effect(model)


def test_vllm_serves_a_mixture_of_experts(tmp_path):
    prepare_mixture(tmp_path, "mixtral")
    found = check(tmp_path, "merged", tmp_path / "measured", **VLLM)
    assert found.worst_document < found.bound
    assert found.answer_gap < found.bound


def test_adapters_of_a_sweep_are_served_on_one_base(exported, tmp_path):
    """They differ in rank and in modules, and none answers for another."""
    for name, changes in SWEEP.items():
        random_adapter(stock(exported, "original"), **changes).save_pretrained(tmp_path / name)
    documents = TokenStore.open(exported / "tokens").heldout_documents()[:2]
    options = {"dtype": "float32", "max_tokens": 256, "adapter": {"r": 16}, "gpus": 0}
    start = VllmStart(Path(SERVING), exported / "model", exported / "adapter", **options)
    with running(VllmServer, start) as server:
        for name in SWEEP:
            server.load_adapter(name, tmp_path / name)
        served = {name: log_p_of(server, documents, model=name) for name in SWEEP}
    for name in SWEEP:
        model = PeftModel.from_pretrained(stock(exported, "original"), tmp_path / name)
        here = {
            other: float(np.abs(served[other] - log_p(model, documents)).max()) for other in SWEEP
        }
        assert here.pop(name) < 1e-3 < min(here.values())


def test_vllm_serves_smollm2_after_some_steps(tmp_path):
    tuned = get_peft_model(smollm2(tmp_path), LoraConfig(r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-3)
    save_tokens(tmp_path / "tokens")
    for ids, _ in TokenStore.open(tmp_path / "tokens").heldout_documents()[:2]:
        row = torch.tensor([ids.tolist()])
        tuned(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(tmp_path / "adapter")
    add_companions(tmp_path, exported=("adapter",))
    found = check(tmp_path, "tuned_on_original", tmp_path / "measured", **VLLM)
    assert found.worst_document < found.bound
    assert found.adapter.share == pytest.approx(1.0, abs=0.01)

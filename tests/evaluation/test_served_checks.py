"""A server beside the evaluation and PEFT: what is the same is recorded, and what a server leaves
out of an adapter is named."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.support.models import random_llama
from workflow.lib.artifacts.manifest_record import Probe
from workflow.lib.evaluation.model_server import BASE
from workflow.lib.evaluation.sample_answers import Prompt
from workflow.lib.evaluation.served_checks import (
    ADAPTER,
    Comparison,
    Reference,
    ServerQuestions,
    ServerResults,
    ask,
    check_prompts,
)
from workflow.lib.system.errors import UserError

BOUND = 1e-3
DOCUMENTS = {
    number: (np.arange(3, 15 + number, dtype=np.uint32), np.arange(12 + number) > 3)
    for number in (4, 9)
}


class Served:
    """A server that computes by PEFT as it should, but for parts of the adapter that it ignores."""

    def __init__(self, folder, *, ignored=()):
        self.model: Any = PeftModel.from_pretrained(random_llama(), str(folder / "adapter"))
        for path, parameter in self.model.named_parameters():
            if ".lora_B." in path and any(f".{kind}." in path for kind in ignored):
                parameter.data.zero_()

    @torch.no_grad()
    def _logits(self, ids, model):
        with self.model.disable_adapter() if model == BASE else nullcontext():
            return self.model(input_ids=torch.tensor([ids])).logits[0]

    def log_probabilities(self, ids, places, *, model):
        log_p = torch.log_softmax(self._logits(ids, model), dim=-1)
        return [float(log_p[place - 1, ids[place]]) for place in places]

    def answer(self, prompt, *, model, most, stop_ids):
        found = list(prompt)
        for _ in range(most):
            found.append(int(self._logits(found, model)[-1].argmax()))
        return found[len(prompt) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an adapter of attention, MLP and head that is not zero."""
    folder = tmp_path_factory.mktemp("served")
    targets = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
    tuned = get_peft_model(random_llama(), LoraConfig(r=4, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return folder


ASKED = ServerQuestions(DOCUMENTS, [Prompt(4, [3, 4, 5, 6], [7])], [2], most=3)


def known_of(losses):
    found = {n: (losses[n], int(mask.sum())) for n, (_, mask) in DOCUMENTS.items()}
    return Reference(found, ["8 9"])


def compared(folder, **server):
    """Return what a server says, beside PEFT."""
    served: Any = Served(folder, **server)
    reference = known_of(dict.fromkeys(DOCUMENTS, 0.0))
    results = ask(served, ASKED, served=ADAPTER)
    comparison = Comparison("vLLM 9", ASKED, reference, results, bound=BOUND)
    return comparison, PeftModel.from_pretrained(random_llama(), str(folder / "adapter"))


def test_adapter_acts_as_in_peft(folder):
    comparison, model = compared(folder)
    found = comparison.adapter_effect(model)
    assert found.share == pytest.approx(1.0, abs=1e-3)
    assert found.effect > 10 * BOUND > found.difference
    assert comparison.answer_gap(model) == pytest.approx(0.0, abs=BOUND)


def test_merged_model_has_no_adapter(folder):
    comparison, _ = compared(folder)
    assert comparison.adapter_effect(random_llama()) is None


@pytest.mark.parametrize("ignored", [["self_attn"], ["mlp"], ["lm_head"]])
def test_adapter_of_which_a_server_ignores_modules_is_refused(folder, ignored):
    comparison, model = compared(folder, ignored=ignored)
    with pytest.raises(UserError, match=r"does not apply the adapter as PEFT .* in the same way"):
        comparison.adapter_effect(model)


def test_ignored_adapter_is_noticed_under_a_bound_that_is_wider_than_its_effect(folder):
    comparison, model = compared(folder, ignored=["self_attn", "mlp", "lm_head"])
    effect = compared(folder)[0].adapter_effect(model).effect
    with pytest.raises(UserError, match="0% of it in the same way"):
        replace(comparison, bound=1.01 * effect).adapter_effect(model)


def comparison_of(served, evaluated, **how):
    results = ServerResults(served, np.zeros(0), None, [[8, 9, 2]])
    return Comparison("vLLM 9", ASKED, known_of(evaluated), results, bound=0.01, **how)


def test_losses_within_the_bound_are_recorded():
    found = comparison_of({4: 8.04, 9: 13.0}, {4: 8.0, 9: 13.0})
    assert found.worst_document() == pytest.approx(0.04 / 12)
    assert found.loss == pytest.approx(21.04 / 29)


@pytest.mark.parametrize("wrong", [8.2, 7.8, float("nan")])
def test_document_of_another_loss_is_refused(wrong):
    with pytest.raises(UserError, match=r"1 of 2 documents are more than 0\.01 apart, document 4"):
        comparison_of({4: wrong, 9: 13.0}, {4: 8.0, 9: 13.0}).worst_document()


def test_mean_loss_is_judged_where_weights_are_rounded():
    """A document is 0.2 / 12 nats off, and all together are 0.2 / 29."""
    found = comparison_of({4: 8.2, 9: 13.0}, {4: 8.0, 9: 13.0}, rounded=True)
    assert found.worst_document() == pytest.approx(0.2 / 12)


@pytest.mark.parametrize("wrong", [8.4, 7.6, float("nan")])
def test_mean_loss_beyond_the_bound_is_refused(wrong):
    how = {"rounded": True, "setting": "export.gguf = q8_0"}
    with pytest.raises(UserError, match=r"export\.gguf = q8_0: .* Choose a format of more bits"):
        comparison_of({4: wrong, 9: 13.0}, {4: 8.0, 9: 13.0}, **how).worst_document()


@pytest.mark.parametrize("rounded", [False, True])
def test_rounding_of_the_base_is_no_fault_of_the_adapter(folder, rounded):
    comparison, model = compared(folder)
    results = comparison.results
    noise = np.random.default_rng(0).normal(0.0, 3 * BOUND, size=results.log_p.size)
    results = replace(results, log_p=results.log_p + noise, log_p_base=results.log_p_base + noise)
    off = replace(comparison, results=results, rounded=rounded)
    if rounded:
        assert off.adapter_effect(model).difference > 2 * BOUND
    else:
        with pytest.raises(UserError, match="does not apply the adapter"):
            off.adapter_effect(model)


def test_prompt_with_other_ids_is_refused():
    server: Any = SimpleNamespace(name="S", setting="export.serve", text_ids=lambda t: [len(t)])
    tokenizer: Any = SimpleNamespace(decode=str)
    assert check_prompts(server, tokenizer, [Probe(text="abc", ids=[3])]) == 1
    with pytest.raises(UserError, match=r"S writes a text as '\[3\]', and Transformers"):
        check_prompts(server, tokenizer, [Probe(text="abc", ids=[4])])


def test_answer_that_is_not_the_most_likely_is_refused():
    found = comparison_of({}, {4: 8.0, 9: 13.0})
    with pytest.raises(UserError, match=r"greedy answer with a token that is [\d.]+ nats less"):
        found.answer_gap(random_llama())


def test_answers_are_compared_as_they_read():
    class Tokenizer:
        def decode(self, ids, *, skip_special_tokens):
            return " ".join(map(str, ids))

    tokenizer: Any = Tokenizer()
    assert comparison_of({}, {4: 8.0, 9: 13.0}).equal_answers(tokenizer) == 1

"""Drawing of tokens: the probabilities, and what an answer depends on."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.support.models import quantized, tiny_llama
from tests.support.tiny import VOCAB_SIZE
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.stock_models import load_base, packed_linears
from workflow.lib.rounds import generation
from workflow.lib.rounds.generation import (
    LARGEST,
    Ends,
    Request,
    decode_for_answers_,
    drawn_tokens,
    sample,
)
from workflow.lib.settings.config import AnswersConfig

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -3.0])
DRAWS = 20_000
CPU = torch.device("cpu")


def counts(**how):
    uniform = torch.from_numpy(np.random.default_rng(0).random((DRAWS, 1)))
    tokens = drawn_tokens(LOGITS.expand(DRAWS, -1), uniform, **how)
    return np.bincount(tokens[:, 0].numpy(), minlength=len(LOGITS))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_are_drawn_with_the_models_probabilities(temperature):
    expected = DRAWS * (LOGITS.double() / temperature).softmax(-1).numpy()
    assert chisquare(counts(temperature=temperature, top_p=1.0), expected).pvalue > 0.001


def test_least_probable_tokens_are_left_out_and_the_others_keep_their_ratios():
    """The likeliest three have 0.57 + 0.23 + 0.10: two of them do not reach 0.85."""
    drawn = counts(temperature=1.0, top_p=0.85)
    kept = LOGITS.double().softmax(-1).topk(3)
    assert set(np.flatnonzero(drawn)) == set(kept.indices.tolist())
    expected = DRAWS * kept.values / kept.values.sum()
    assert chisquare(drawn[kept.indices], expected.numpy()).pvalue > 0.001


def test_largest_uniform_draws_a_token_that_counts():
    uniform = torch.full((1, 1), np.nextafter(1.0, 0.0), dtype=torch.float64)
    assert drawn_tokens(LOGITS[None], uniform, temperature=1.0, top_p=1.0).item() == 5


@pytest.fixture(scope="module")
def model(tiny_base):
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "attention": "sdpa"}
    return load_base(Checkpoint(tiny_base), **options)


def requests(count):
    prompts = [[5, 6, 7], [9, 3], [4, 4, 4, 8, 11]]
    return [Request(prompts[n % 3], n // 3, seed=3) for n in range(count)]


def sampled(model, asked, **settings):
    return sample(
        model,
        asked,
        AnswersConfig(max_new_tokens=6, **settings),
        ends=Ends([2], (), Letters()),
        device=torch.device("cpu"),
        on_answers=lambda answers, tokens: None,
    )


def test_answers_depend_neither_on_their_batch_nor_on_their_order(model):
    asked = requests(LARGEST["cpu"] + 5)
    together = sampled(model, asked)
    alone = [sampled(model, [one])[0] for one in reversed(asked)][::-1]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in together}) > len(asked) / 2
    assert all(0 <= token < VOCAB_SIZE for answer in together for token in answer.ids)


@torch.no_grad()
def test_log_probabilities_are_those_of_the_model(model):
    (request,) = requests(1)
    (answer,) = sampled(model, [request], temperature=0.7, top_p=0.9)
    row = torch.tensor([[*request.prompt, *answer.ids]])
    log_p = model(row).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    expected = log_p.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
    assert answer.log_probs == pytest.approx(expected, abs=1e-4)


def test_other_seeds_and_numbers_give_other_answers(model):
    first, other_number, other_seed = (
        Request([5, 6, 7], n, s) for n, s in ((0, 0), (1, 0), (0, 1))
    )
    answers = sampled(model, [first, other_number, other_seed, first])
    assert answers[0].ids == answers[3].ids
    assert answers[0].log_probs == pytest.approx(answers[3].log_probs, abs=1e-4)
    assert len({tuple(answer.ids) for answer in answers}) == 3


@pytest.mark.parametrize(("free_shares", "decodes"), [(2.0, True), (1.9, False)])
def test_linears_are_decoded_once_where_half_of_the_free_memory_holds_them(
    tmp_path, monkeypatch, free_shares, decodes
):
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    tiny_llama(tmp_path / "model", vocab_size=VOCAB_SIZE, **sizes)
    options = {"device": CPU, "compute_dtype": torch.float32, "attention": "sdpa"}
    model = load_base(Checkpoint(quantized(tmp_path / "model", tmp_path / "nf4")), **options)
    size = sum(4 * x.in_features * x.out_features for x in packed_linears(model).values())
    expected = sampled(model, requests(6))
    monkeypatch.setattr(generation, "free_bytes", lambda device: int(free_shares * size))
    decode_for_answers_(model, torch.device("cuda", 0))
    assert bool(packed_linears(model)) is not decodes
    answers = sampled(model, requests(6))
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + token % 26) for token in ids)


def test_text_ends_an_answer_at_the_token_that_completes_it():
    ends = Ends([2], ("cd",), Letters())
    answer = ends.cut([0, 1, 28, 29, 4], [0.0] * 5)
    assert (answer.ids, answer.finish, answer.text) == ([0, 1, 28, 29], "stop", "abcd")
    assert ends.cut([0, 1, 2, 9], [0.0] * 4).ids == [0, 1, 2]
    assert ends.cut([0, 1, 3], [0.0] * 3).finish == "length"

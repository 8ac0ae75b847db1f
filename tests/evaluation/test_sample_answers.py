import numpy as np
import pytest
import torch

from tests.support.models import random_llama
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.tiny_export import random_documents
from workflow.lib.evaluation.sample_answers import (
    AnswerSettings,
    Prompt,
    choose_prompts,
    generate_answers,
    stop_token_ids,
)

CPU = torch.device("cpu")
EOS = 2
GENERATOR = np.random.default_rng(3)
PROMPTS = [
    Prompt(number, [int(i) for i in GENERATOR.integers(6, VOCAB_SIZE, size=length)], [7])
    for number, length in enumerate([5, 1, 13, 8, 2])
]


@pytest.fixture(scope="module")
def model():
    return random_llama(vocab_size=VOCAB_SIZE, eos_token_id=EOS).eval()


def answers(model, *, stop_ids=(), batch_size=3, max_new_tokens=9):
    settings = AnswerSettings(
        stop_ids=list(stop_ids), max_new_tokens=max_new_tokens, batch_size=batch_size
    )
    return generate_answers(model, PROMPTS, settings=settings, device=CPU)


@torch.no_grad()
def naive(model, prompt, *, max_new_tokens=9):
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(model):
    return [naive(model, prompt.prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_answers_are_the_most_likely_tokens_in_the_order_of_the_prompts(
    model, expected, batch_size
):
    no_stop = VOCAB_SIZE - 1  # a token that no answer has
    assert not any(no_stop in answer for answer in expected)
    assert answers(model, stop_ids=[no_stop], batch_size=batch_size) == expected


def test_answer_ends_before_the_first_stop_token(model, expected):
    stop = expected[0][4]
    cut = [a[: a.index(stop)] if stop in a else a for a in expected]
    assert answers(model, stop_ids=[stop]) == cut
    assert len(cut[0]) <= 4


def test_sampling_settings_of_the_model_do_not_count(model, expected):
    kept = model.generation_config
    model.generation_config = type(kept)(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=EOS
    )
    try:
        assert answers(model, stop_ids=[VOCAB_SIZE - 1]) == expected
    finally:
        model.generation_config = kept


def document(ids, mask):
    return np.array(ids, dtype=np.uint32), np.array(mask, dtype=np.bool_)


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ([9, 8, 7, 6, 5, 4, 3], [0, 0, 1, 1, 0, 1, 1], Prompt(0, [9, 8], [7, 6])),
        ([9, 8, 7], [0, 1, 1], Prompt(0, [9], [8, 7])),
    ],
)
def test_prompt_ends_at_the_first_trained_token_and_reference_at_the_next_gap_or_the_end(
    ids, mask, expected
):
    assert choose_prompts([document(ids, mask)], [0], count=1, seed=0) == [expected]


def test_choice_of_prompts_is_a_function_of_the_seed():
    documents = random_documents(12)
    numbers = [0, 2, 3, 5, 7, 8, 9, 11]
    chosen = choose_prompts(documents, numbers, count=4, seed=1)
    assert chosen == choose_prompts(documents, numbers, count=4, seed=1)
    picked = [prompt.document for prompt in chosen]
    assert picked == sorted(set(picked) & set(numbers))
    assert len(picked) == 4


def test_special_tokens_that_end_references_stop_an_answer(model, tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    turn_end = tokenizer.convert_tokens_to_ids("<|user|>")  # special, and not the eos token
    ordinary = 77
    prompts = [Prompt(0, [9], [8, turn_end]), Prompt(1, [9], [turn_end, ordinary])]
    assert stop_token_ids(prompts, tokenizer=tokenizer, model=model) == sorted({EOS, turn_end})

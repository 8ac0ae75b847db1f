"""Conversations with a model: prompts through the template, stops, context, and what is kept."""

import pytest
import torch
from transformers import LlamaForCausalLM, TextStreamer

from tests.support.models import random_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.evaluation.conversation import Conversation, Sampling
from workflow.lib.system.errors import UserError

NEW_TOKENS = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return random_llama(vocab_size=len(tokenizer), max_position_embeddings=64).eval()


def conversation(model, tokenizer, *, stop_ids=(), **changes):
    return Conversation(model, tokenizer, Sampling(list(stop_ids), NEW_TOKENS), **changes)


def greedy(model, ids, count):
    """Continue token ids by the likeliest tokens, without a cache."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def test_answer_continues_the_rendered_turns_before_it(model, tokenizer):
    talk = conversation(model, tokenizer, system="Be brief.")
    first = talk.answer("the fox")
    second = talk.answer("the dog")
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "the dog"},
    ]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    made = greedy(model, ids, NEW_TOKENS)[0, ids.shape[1] :]
    assert second == tokenizer.decode(made, skip_special_tokens=True)
    assert [turn["content"] for turn in talk.turns] == ["the fox", first, "the dog", second]


def test_answer_ends_at_a_stop_token(model, tokenizer):
    whole = conversation(model, tokenizer)._ids([{"role": "user", "content": "fox"}], "fox")
    first = int(greedy(model, whole, 1)[0, -1])
    talk = conversation(model, tokenizer, stop_ids=[first])
    assert talk.answer("fox") == tokenizer.decode([first], skip_special_tokens=True)


def test_text_without_a_template_is_continued_and_forgotten(model, tokenizer, tmp_path):
    talk = conversation(model, tiny_tokenizer(tmp_path, chat_template=False))
    ids = talk.tokenizer("the fox", return_tensors="pt")["input_ids"]
    made = greedy(model, ids, NEW_TOKENS)[0, ids.shape[1] :]
    assert talk.answer("the fox") == tokenizer.decode(made, skip_special_tokens=True)
    assert talk.turns == []


def test_conversation_longer_than_the_context_is_refused_and_keeps_its_turns(model, tokenizer):
    talk = conversation(model, tokenizer)
    talk.answer("the fox")
    turns = talk.turns
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model's context ends at 64"):
        talk.answer("quick " * 200)
    assert talk.turns == turns


def test_answer_that_is_interrupted_leaves_the_turns_as_they_were(model, tokenizer):
    class Interrupted(TextStreamer):
        def put(self, value):
            raise KeyboardInterrupt

    talk = conversation(model, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        talk.answer("the fox", streamer=Interrupted(tokenizer))
    assert talk.turns == []

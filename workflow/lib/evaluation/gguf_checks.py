"""A GGUF file, as llama.cpp serves it, beside its model in Transformers: held-out loss, answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.data.tokens.token_store import Document
from workflow.lib.evaluation.sample_answers import (
    AnswerSettings,
    Prompt,
    choose_prompts,
    generate_answers,
    stop_token_ids,
)
from workflow.lib.evaluation.served_checks import Server, log_p, log_p_of
from workflow.lib.settings.evaluate import GgufFormat
from workflow.lib.system.errors import UserError

# Largest difference of the mean loss, nats per token: about three times that of the merged model of
# SmolLM2-135M-Instruct, tuned for 12 steps, or 0.01 (96 tokens, llama.cpp 11549, CPU, 2026-11-23).
# Larger models lose less. bf16 was 0.0002 off, q8_0 0.0108, q6_k 0.0147, q5_k_m 0.0317, q4_k_m
# 0.0931.
BOUNDS: dict[GgufFormat, float] = {
    "f32": 0.01,
    "f16": 0.01,
    "bf16": 0.01,
    "q8_0": 0.03,
    "q6_k": 0.05,
    "q5_k_m": 0.1,
    "q4_k_m": 0.3,
}
TOKENS = 96  # compared; each is a request
PROMPTS, NEW_TOKENS = 4, 24


@dataclass(frozen=True)
class Reference:
    """What Transformers says: the mean loss of documents, nats per token; answers to prompts."""

    documents: list[Document]
    loss: float
    prompts: list[Prompt]
    answers: list[list[int]]
    stop_ids: list[int]


@torch.no_grad()
def reference(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    *,
    seed: int,
) -> Reference:
    """Return what a model in Transformers says of held-out documents with trained tokens."""
    some = first_tokens(documents)
    prompts = choose_prompts(documents, range(len(documents)), count=PROMPTS, seed=seed)
    stop_ids = stop_token_ids(prompts, tokenizer=tokenizer, model=model)
    settings = AnswerSettings(stop_ids=stop_ids, max_new_tokens=NEW_TOKENS, batch_size=1)
    answers = generate_answers(model, prompts, settings=settings, device=torch.device("cpu"))
    return Reference(some, -float(log_p(model, some).mean()), prompts, answers, stop_ids)


def first_tokens(documents: Sequence[Document]) -> list[Document]:
    """Return documents with `TOKENS` trained tokens, or all of them; of the last one the first."""
    found, left = [], TOKENS
    for ids, mask in documents:
        kept = mask & (np.cumsum(mask) <= left)
        if kept.any():
            found.append((ids, kept))
        left -= int(np.count_nonzero(kept))
    return found


def compared(server: Server, format_name: GgufFormat, expected: Reference) -> dict[str, Any]:
    """Return the fields of `GgufFile` that a server's losses and answers decide; raises `UserError`
    beyond the format's bound."""
    found = log_p_of(server, expected.documents)
    loss, bound = -float(found.mean()), BOUNDS[format_name]
    if not abs(loss - expected.loss) <= bound:  # also true of NaN
        raise UserError(
            f"export.gguf = {format_name}: llama.cpp gives held-out tokens {loss:.4f} nats, "
            f"Transformers {expected.loss:.4f}; they may differ by {bound}. Nothing is exported: "
            "choose a format of more bits, or take a newer llama.cpp."
        )
    answers = [
        server.answer(prompt.prompt, most=NEW_TOKENS, stop_ids=expected.stop_ids)
        for prompt in expected.prompts
    ]
    return {
        "loss": loss,
        "reference_loss": expected.loss,
        "bound": bound,
        "tokens": len(found),
        "answers": len(answers),
        "equal_answers": sum(a == b for a, b in zip(answers, expected.answers, strict=True)),
    }

"""Greedy answers to held-out prompts, for a person to read base and tuned side by side.

A document's prompt is what precedes its first trained token, and its reference is the first unbroken run
of trained tokens: in a conversation, the first answer.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.tokens import Document


@dataclass(frozen=True)
class Prompt:
    """A held-out document cut where the model must go on; token ids."""

    document: int
    prompt: list[int]
    reference: list[int]


def choose_prompts(
    documents: Sequence[Document], numbers: Sequence[int], *, count: int, seed: int
) -> list[Prompt]:
    """Return at most `count` prompts, drawn by `seed` from the documents of these numbers, in order.

    Each of these documents has trained tokens.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(numbers), size=min(count, len(numbers)), replace=False)
    return [_cut(documents[number], number) for number in sorted(numbers[i] for i in drawn)]


def _cut(document: Document, number: int) -> Prompt:
    ids, mask = document
    first = int(np.argmax(mask))
    gaps = np.flatnonzero(~mask[first:])
    end = first + int(gaps[0]) if len(gaps) else len(ids)
    return Prompt(number, [int(i) for i in ids[:first]], [int(i) for i in ids[first:end]])


def stop_token_ids(
    prompts: Sequence[Prompt],
    *,
    tokenizer: PreTrainedTokenizerBase,
    model: PeftModel | PreTrainedModel,
) -> list[int]:
    """Return the tokens that end an answer.

    The end tokens of tokenizer and model, and the special tokens that end the references: a chat
    template may close a turn with another token than the tokenizer's `eos_token`.
    """
    config = model.generation_config
    named = [tokenizer.eos_token_id, None if config is None else config.eos_token_id]
    ids = {i for value in named for i in (value if isinstance(value, list) else [value])}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {prompt.reference[-1] for prompt in prompts} & special
    return sorted(i for i in ids if i is not None)


def greedy_answers(
    model: PeftModel | PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    stop_ids: list[int],
    max_new_tokens: int,
    batch_size: int,
    device: torch.device,
    description: str = "samples",
) -> list[list[int]]:
    """Return the most likely continuation of each prompt, token by token, without the token that ended it."""
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,
    )
    answers: list[list[int]] = [[]] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].prompt))
    for first in tqdm(
        range(0, len(prompts), batch_size),
        desc=description, unit="batch", disable=None, file=sys.stderr,
    ):  # fmt: skip
        batch = by_length[first : first + batch_size]
        ids, mask = _left_padded([prompts[index].prompt for index in batch], device=device)
        with torch.inference_mode():
            output = model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, generation_config=settings
            )
        for index, row in zip(batch, output[:, ids.shape[1] :].tolist(), strict=True):
            answers[index] = _until_stop(row, stop_ids)
    return answers


def _left_padded(
    rows: Sequence[list[int]], *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, both (rows, longest): generation continues at the right edge."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _until_stop(row: list[int], stop_ids: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(row) if token in stop_ids]
    return row[: ends[0]] if ends else row

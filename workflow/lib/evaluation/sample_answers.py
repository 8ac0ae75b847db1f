"""Answers to held-out prompts, for a person to compare base and tuned.

A prompt is the text before a document's first trained token; its reference, the first run of
trained tokens. Answers are greedy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from workflow.lib.data.tokens.token_store import Document
from workflow.lib.distributed.work_sharing import is_sharded
from workflow.lib.evaluation.batch_size import LARGEST, batches, fitting_batch_size, halving
from workflow.lib.evaluation.token_steps import Ended, Pick, continue_by_steps, takes_steps
from workflow.lib.model.layers.rotary_by_length import rotated_alike
from workflow.lib.system.progress import Progress

WHAT = "samples"  # for the log
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Prompt:
    """A held-out document cut where the model must continue; token ids."""

    document: int
    prompt: list[int]
    reference: list[int]


def choose_prompts(
    documents: Sequence[Document], numbers: Sequence[int], *, count: int, seed: int
) -> list[Prompt]:
    """Return at most `count` prompts, drawn by `seed` from these documents, in order."""
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
    """Return the tokens that end an answer: of tokenizer and model, and special tokens at the ends
    of references, as a chat template may close turns without `eos_token`."""
    config: GenerationConfig | None = model.generation_config
    named = [tokenizer.eos_token_id, None if config is None else config.eos_token_id]
    ids = {i for value in named for i in (value if isinstance(value, list) else [value])}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {prompt.reference[-1] for prompt in prompts} & special
    return sorted(i for i in ids if i is not None)


@dataclass(frozen=True)
class AnswerSettings:
    stop_ids: list[int]  # tokens that end an answer
    max_new_tokens: int
    batch_size: int | str  # Prompts, or `auto`; halved where memory runs out


def generate_answers(
    model: PeftModel | PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    settings: AnswerSettings,
    device: torch.device,
) -> list[list[int]]:
    """Return a continuation of each prompt, token by token, without its end token."""
    with Progress(WHAT, total=len(prompts), unit="answers") as progress:

        def answers(numbers: list[int]) -> list[list[int]]:
            rows = continue_rows(
                model,
                [prompts[number].prompt for number in numbers],
                stop_ids=settings.stop_ids,
                max_new_tokens=settings.max_new_tokens,
                device=device,
            )
            progress.add(len(rows))
            return [until_stop(row, settings.stop_ids) for row in rows]

        return in_batches(
            answers,
            model,
            [prompt.prompt for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            device=device,
            batch_size=settings.batch_size,
        )


def in_batches(
    answers: Callable[[list[int]], list[AnswerT]],
    model: PeftModel | PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    device: torch.device,
    batch_size: int | str = "auto",
    largest: Mapping[str, int] = LARGEST,
) -> list[AnswerT]:
    """Return the answers to prompts. answers: called with the numbers of some of similar length,
    fewer where memory runs out."""
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    start = fitting_batch_size(
        batch_size,
        config=model.config,
        device=device,
        tokens=max(lengths) + max_new_tokens,
        keeps_cache=True,
        largest=largest,
    )
    alike = [rotated_alike(model.config, n, new_tokens=max_new_tokens) for n in lengths]
    done: dict[int, AnswerT] = {}

    def with_size(size: int) -> list[AnswerT]:
        for batch in batches(lengths, alike, size=size):
            if pending := [number for number in batch if number not in done]:
                done.update(zip(pending, answers(pending), strict=True))
        return [done[number] for number in range(len(prompts))]

    return halving(with_size, start=start, what=WHAT, collective=is_sharded(model))


@dataclass
class _Picked(LogitsProcessor):
    """Leaves the picked token of each row. count: tokens of an answer so far."""

    pick: Pick
    count: torch.Tensor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.pick(scores, self.count)
        self.count.add_(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


@dataclass
class _Ends(StoppingCriteria):
    """Ends rows whose answer, behind the prompt of `prompt_tokens`, ends."""

    ended: Ended
    prompt_tokens: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        rows = input_ids[:, self.prompt_tokens :].tolist()
        return torch.tensor(list(map(self.ended, rows)), dtype=torch.bool, device=input_ids.device)


def likeliest(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens (rows, 1)."""
    return logits.argmax(dim=-1, keepdim=True)


@torch.no_grad()  # as in `heldout`
def continue_rows(
    model: PeftModel | PreTrainedModel,
    rows: Sequence[list[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    device: torch.device,
    pick: Pick = likeliest,
    ended: Ended | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row of one batch, with those after an end. ended: where more
    than `stop_ids` ends an answer, which it then knows, too."""
    ids, mask = _left_padded(rows, device=device)
    if takes_steps(model, device):
        ends = ended or (lambda answer: answer[-1] in stop_ids)
        options: Any = {"pick": pick, "ended": ends, "max_new_tokens": max_new_tokens}
        return continue_by_steps(model, ids, mask, **options)
    picked = _Picked(pick, torch.zeros(1, dtype=torch.long, device=device))
    output = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=[*stop_ids] or None,
            pad_token_id=stop_ids[0] if stop_ids else 0,
        ),
        synced_gpus=False,  # `work_sharing.in_step` synchronizes any number of calls
        logits_processor=LogitsProcessorList([picked]),
        stopping_criteria=StoppingCriteriaList([_Ends(ended, ids.shape[1])] if ended else []),
    )
    new: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return new


def _left_padded(
    rows: Sequence[list[int]], *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask (rows, longest): generation continues at the right edge."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def until_stop(row: list[int], stop_ids: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(row) if token in stop_ids]
    return row[: ends[0]] if ends else row

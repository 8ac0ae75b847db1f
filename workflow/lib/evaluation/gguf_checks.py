"""A GGUF file beside its model in Transformers: prompt ids, answers, held-out loss.

llama.cpp's own server (`xllamacpp`, envs/gguf.txt) runs in this process. Its log-probabilities are
of the token behind a prompt, so a loss asks once a position."""

import json
import math
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.artifacts.gguf_record import GgufFile
from workflow.lib.artifacts.manifest_record import Probe
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.evaluation.sample_answers import (
    AnswerSettings,
    Prompt,
    choose_prompts,
    generate_answers,
    stop_token_ids,
    until_stop,
)
from workflow.lib.settings.evaluate import GgufForm, GgufFormat
from workflow.lib.system.errors import UserError

PACKAGE = "xllamacpp"
BIAS = 1e6  # on one logit: no other token is written


class LlamaCppServer:
    """A running model; it ends with the object."""

    name, setting = "llama.cpp", "export.gguf"

    def __init__(
        self, path: Path, *, adapter: Path | None, context_tokens: int, threads: int
    ) -> None:
        try:
            import xllamacpp
        except ImportError:
            raise UserError(
                f"export.gguf: the package {PACKAGE} is not installed, by which the files are "
                "checked. Run pip install -r envs/gguf.txt, or leave out export.gguf."
            ) from None
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.port = context_tokens, 1, 0
        params.n_gpu_layers, params.warmup, params.use_jinja = 0, False, True
        params.verbosity = -1
        # else one for each core, which wait for each other by spinning
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if adapter is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self._server = xllamacpp.Server(params)
        # no proxy stands between a process and itself
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._letter = self.text_ids("a")[-1]

    def _ask(self, path: str, **question: Any) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - an address of this machine
            f"{self._server.listening_address}{path}",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with self._opener.open(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation asking for an answer, by the file's template."""
        prompt = self._ask("/apply-template", messages=messages)["prompt"]
        ids: list[int] = self._ask(
            "/tokenize", content=prompt, add_special=True, parse_special=True
        )["tokens"]
        return ids

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without tokens that begin or end it."""
        ids: list[int] = self._ask(
            "/tokenize", content=text, add_special=False, parse_special=True
        )["tokens"]
        return ids

    def answer(self, prompt: list[int], *, max_new_tokens: int) -> list[int]:
        """Return the greedy continuation of a prompt, with the token that ended it if one did."""
        found = self._ask(
            "/completion",
            prompt=prompt,
            n_predict=max_new_tokens,
            temperature=0.0,
            return_tokens=True,
        )
        tokens: list[int] = found["tokens"]
        return tokens

    def log_probability(
        self, prompt: list[int], target: int, *, vocab_size: int
    ) -> tuple[float, int]:
        """Return (log p of `target` after a prompt, the most likely token). Of a token that is part
        of a character, the server (of 2026-10) returns nothing where it is the one that is written:
        then a letter is, and the target is looked up among all tokens."""
        if found := self._probabilities(prompt, written=target, count=1):
            return float(found["logprob"]), found["top_logprobs"][0]["id"]
        candidates = self._probabilities(prompt, written=self._letter, count=vocab_size)
        by_token = {entry["id"]: float(entry["logprob"]) for entry in candidates["top_logprobs"]}
        return by_token.get(target, -math.inf), candidates["top_logprobs"][0]["id"]

    def _probabilities(self, prompt: list[int], *, written: int, count: int) -> dict[str, Any]:
        """Return what the server says of the token that it is made to write and of the `count` most
        likely ones; nothing where that token is part of a character. It is made to by a bias, and
        the probabilities are those before the bias."""
        found = self._ask(
            "/completion",
            prompt=prompt,
            n_predict=1,
            temperature=0.0,
            n_probs=count,
            logit_bias=[[written, BIAS]],
        )
        entries: list[dict[str, Any]] = found.get("completion_probabilities") or [{}]
        return entries[0]


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
POSITIONS = 96  # compared; each is a request that returns the whole vocabulary
PROMPTS, NEW_TOKENS = 4, 24
ROLES = {"system", "user", "assistant"}


@dataclass(frozen=True)
class Reference:
    """What Transformers says: by position prompt, target, log p and most likely token; answers."""

    positions: list[tuple[list[int], int, float, int]]
    prompts: list[Prompt]
    answers: list[list[int]]
    stop_ids: list[int]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -sum(log_p for *_, log_p, _ in self.positions) / len(self.positions)


@torch.no_grad()
def reference(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    *,
    seed: int,
) -> Reference:
    """Return what a model in Transformers says of held-out documents with trained tokens."""
    positions: list[tuple[list[int], int, float, int]] = []
    for ids, mask in documents:
        row = [int(token) for token in ids]
        log_p = torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0].float(), dim=-1)
        for place in np.flatnonzero(mask[1:]) + 1:
            before = log_p[place - 1]
            found = (row[:place], row[place], float(before[row[place]]), int(before.argmax()))
            positions.append(found)
        if len(positions) >= POSITIONS:
            break
    prompts = choose_prompts(documents, range(len(documents)), count=PROMPTS, seed=seed)
    stop_ids = stop_token_ids(prompts, tokenizer=tokenizer, model=model)
    settings = AnswerSettings(stop_ids=stop_ids, max_new_tokens=NEW_TOKENS, batch_size=1)
    answers = generate_answers(model, prompts, settings=settings, device=torch.device("cpu"))
    return Reference(positions[:POSITIONS], prompts, answers, stop_ids)


class Tokenizes(Protocol):
    """A server that writes prompts; setting: what asks for it."""

    name: str
    setting: str

    def text_ids(self, text: str) -> list[int]: ...
    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]: ...


def check_prompts(
    server: Tokenizes, tokenizer: PreTrainedTokenizerBase, probes: Sequence[Probe]
) -> int:
    """Return how many conversations and texts have the same token ids in both; raises `UserError`
    at another. Left out: tools, and content that is no text."""
    checked = 0
    for probe in probes:
        if probe.text is not None:
            theirs, ours = server.text_ids(probe.text), probe.ids
        elif probe.messages is not None and _is_plain(probe):
            messages = _asking(probe.messages)
            theirs = server.prompt_ids(messages)
            ours = _prompt_ids(tokenizer, messages)
        else:
            continue
        if theirs != ours:
            raise UserError(
                f"{server.setting}: {server.name} writes {probe.described} as "
                f"{tokenizer.decode(theirs)!r}, and Transformers as {tokenizer.decode(ours)!r} (or "
                f"the same text in other tokens). Leave out {server.setting}, or take a newer "
                f"{server.name}."
            )
        checked += 1
    return checked


def _is_plain(probe: Probe) -> bool:
    messages = probe.messages or []
    return not probe.tools and all(
        message["role"] in ROLES
        and set(message) == {"role", "content"}
        and isinstance(message["content"], str)
        for message in messages
    )


def _asking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages up to the last one of the user, which an answer is asked for."""
    last = max(
        (number for number, message in enumerate(messages) if message["role"] == "user"),
        default=len(messages) - 1,
    )
    return messages[: last + 1]


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    written: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    ids: list[int] = written["input_ids"]
    return ids


@dataclass(frozen=True)
class Loaded:
    """A GGUF file as llama.cpp has loaded it, with an adapter over it or without."""

    server: LlamaCppServer
    form: GgufForm
    format_name: GgufFormat
    path: Path
    adapter: Path | None = None


def compared(loaded: Loaded, expected: Reference, *, vocab_size: int, prompts: int) -> GgufFile:
    """Return how losses and answers compare; raises `UserError` beyond the format's bound."""
    found = [
        loaded.server.log_probability(prompt, target, vocab_size=vocab_size)
        for prompt, target, *_ in expected.positions
    ]
    loss = -sum(log_p for log_p, _ in found) / len(found)
    _refuse_other_loss(loaded.format_name, loss, expected.loss)
    same = [
        likely == theirs
        for (*_, theirs), (_, likely) in zip(expected.positions, found, strict=True)
    ]
    answers = [
        until_stop(
            loaded.server.answer(prompt.prompt, max_new_tokens=NEW_TOKENS), expected.stop_ids
        )
        for prompt in expected.prompts
    ]
    adapter = loaded.adapter
    return GgufFile(
        form=loaded.form,
        format=loaded.format_name,
        file=loaded.path.name,
        bytes=loaded.path.stat().st_size,
        adapter=None if adapter is None else adapter.name,
        adapter_bytes=None if adapter is None else adapter.stat().st_size,
        prompts=prompts,
        loss=loss,
        reference_loss=expected.loss,
        bound=BOUNDS[loaded.format_name],
        positions=len(found),
        same_most_likely=sum(same) / len(same),
        answers=len(answers),
        equal_answers=sum(a == b for a, b in zip(answers, expected.answers, strict=True)),
    )


def _refuse_other_loss(format_name: GgufFormat, loss: float, expected: float) -> None:
    bound = BOUNDS[format_name]
    if not abs(loss - expected) <= bound:  # also true of NaN
        raise UserError(
            f"export.gguf = {format_name}: llama.cpp gives held-out tokens {loss:.4f} nats, "
            f"Transformers {expected:.4f}; they may differ by {bound}. Nothing is exported: "
            "choose a format of more bits, or take a newer llama.cpp."
        )

"""A server's results on exported files, against the evaluation's numbers and against PEFT.

First the server is asked (`ask`), then its answers are compared (`Comparison`), so that the two are
not in memory together. The adapter must change the log-probabilities as it does in PEFT.

Bounds: the trained and the exported adapter may differ by `Parity.tolerance` in a logit (root mean
square, nats, of the compute dtype). A log-probability has a logit and its normalizer, so twice
that. The greedy token of one of two such models is less likely in the other by at most two of their
largest errors, which are taken as four times the root mean square. If weights are rounded (GGUF),
the mean loss has a bound, and tokens may differ by twice the effect of rounding alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.manifest_record import Probe
from workflow.lib.artifacts.records import AdapterEffect
from workflow.lib.checkpoints.files.config_file import read_settings
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.evaluation.model_server import BASE, ModelServer
from workflow.lib.evaluation.questions import Model
from workflow.lib.evaluation.sample_answers import AnswerSettings, Prompt, generate_answers
from workflow.lib.export.adapter_files import GENERATION_CONFIG
from workflow.lib.system.errors import UserError

ROLES = {"system", "user", "assistant"}
ADAPTER = "adapter"  # name of the adapter in the server
EFFECT_DOCUMENTS = 8  # for the comparison of its effect
LEAST_SHARE = 0.5  # of its change; used if noise is smaller than half of that
TINY = 1e-30  # in place of a zero change
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServerQuestions:
    """The questions: held-out documents by number, prompts."""

    documents: Mapping[int, Document]
    prompts: list[Prompt]
    stop_ids: list[int]
    most: int  # tokens of an answer

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        numbers: Iterable[int],
        *,
        prompts: list[Prompt],
        folder: Path,
        most: int,
        tokens: float = math.inf,
    ) -> "ServerQuestions":
        """Return questions on these documents: the first ones with at most `tokens` trained tokens;
        folder: the exported one, whose settings end answers."""
        chosen: dict[int, Document] = {}
        for number in numbers:
            if sum(int(mask[1:].sum()) for _, mask in chosen.values()) >= tokens:
                break
            chosen[number] = documents[number]
        ends = read_settings(folder / GENERATION_CONFIG)["eos_token_id"]
        return cls(chosen, prompts, ends, most)

    @property
    def longest(self) -> int:
        """Tokens of the longest row of a server, with one more that it must write."""
        rows = [len(prompt.prompt) + self.most for prompt in self.prompts]
        return max(rows + [len(ids) for ids, _ in self.documents.values()]) + 1

    @property
    def compared(self) -> list[Document]:
        """The documents for the comparison of the adapter's effect."""
        return list(self.documents.values())[:EFFECT_DOCUMENTS]


@dataclass(frozen=True)
class Reference:
    """Transformers' results: by document summed -log p and trained tokens; answers."""

    losses: dict[int, tuple[float, int]]
    answers: list[str]

    @classmethod
    def of(cls, evaluation: Evaluation, questions: ServerQuestions) -> "Reference":
        assert evaluation.heldout is not None, "export.serve needs evaluate.heldout"
        measured = {d.document: (d.loss_sum, d.tokens) for d in evaluation.heldout.per_document}
        losses = {number: measured[number] for number in questions.documents}
        return cls(losses, [sample.answer for sample in evaluation.samples])

    @classmethod
    def by(
        cls,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        questions: ServerQuestions,
    ) -> "Reference":
        how: Any = {"batch_size": 1, "device": model.device}
        losses = heldout_losses(model, list(questions.documents.values()), **how)
        settings = AnswerSettings(questions.stop_ids, max_new_tokens=questions.most, batch_size=1)
        rows = generate_answers(model, questions.prompts, settings=settings, device=model.device)
        answers = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
        return cls(dict(zip(questions.documents, losses, strict=True)), answers)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.losses.values())

    @property
    def loss(self) -> float:
        """Nats per trained token."""
        return sum(loss for loss, _ in self.losses.values()) / self.tokens


@dataclass(frozen=True)
class ServerResults:
    """A server's results: loss by document; log p of the trained tokens of
    `ServerQuestions.compared`, and the same without the adapter, if it serves one; answers."""

    losses: dict[int, float]
    log_p: Numbers
    log_p_base: Numbers | None
    answers: list[list[int]]


def log_p_of(server: ModelServer, documents: Iterable[Document], *, model: str) -> Numbers:
    """Return log p of the trained tokens by a server, (tokens,)."""
    log_probs = []
    for ids, mask in documents:
        positions = (np.flatnonzero(mask[1:]) + 1).tolist()
        log_probs.append(server.log_probabilities(ids.tolist(), positions, model=model))
    return np.concatenate(log_probs)


def ask(server: ModelServer, questions: ServerQuestions, *, served: str) -> ServerResults:
    """Return a server's results; served: `BASE`, or the name of a loaded adapter."""
    by_document = {
        number: log_p_of(server, [document], model=served)
        for number, document in questions.documents.items()
    }
    how: Any = {"model": served, "most": questions.most, "stop_ids": questions.stop_ids}
    return ServerResults(
        losses={number: -float(log_p.sum()) for number, log_p in by_document.items()},
        log_p=np.concatenate([*by_document.values()][:EFFECT_DOCUMENTS]),
        log_p_base=None if served == BASE else log_p_of(server, questions.compared, model=BASE),
        answers=[server.answer(prompt.prompt, **how) for prompt in questions.prompts],
    )


@dataclass(frozen=True)
class Comparison:
    """A server's results against Transformers'. bound: nats, of each document, or of all together
    if weights are rounded. A larger difference raises `UserError`."""

    server: str
    questions: ServerQuestions
    reference: Reference
    results: ServerResults
    bound: float
    rounded: bool = False
    setting: str = "export.serve"

    @property
    def loss(self) -> float:
        """Nats per trained token, by the server."""
        return sum(self.results.losses.values()) / self.reference.tokens

    def worst_document(self) -> float:
        """Return the largest difference of a document's loss, nats per token."""
        apart = {
            number: abs(self.results.losses[number] - loss) / tokens
            for number, (loss, tokens) in self.reference.losses.items()
        }
        beyond = {number: far for number, far in apart.items() if not far <= self.bound}  # or NaN
        if beyond and not (self.rounded and abs(self.loss - self.reference.loss) <= self.bound):
            number = max(beyond, key=lambda number: beyond[number])
            raise self._other(
                f"gives held-out tokens {self.loss:.4f} nats, Transformers "
                f"{self.reference.loss:.4f}; {len(beyond)} of {len(apart)} documents are more than "
                f"{self.bound:.2g} apart, document {number} {beyond[number]:.2g}"
            )
        return max(apart.values())

    def _allowed(self, apart: float) -> float:
        """Return the largest allowed difference of a token's log-probability, root mean square;
        apart: the difference by rounded weights alone."""
        return max(self.bound, 2 * apart) if self.rounded else self.bound

    def adapter_effect(self, model: Model) -> AdapterEffect | None:
        """Return the adapter's effect in the server and in PEFT; None for a merged model."""
        if not isinstance(model, PeftModel):
            return None
        assert self.results.log_p_base is not None, "the server was asked without the adapter too"
        with model.disable_adapter():
            plain = log_p(model, self.questions.compared)
        tuned = log_p(model, self.questions.compared)
        change, served_change = tuned - plain, self.results.log_p - self.results.log_p_base
        effect = AdapterEffect(
            effect=_rms(change),
            served_effect=_rms(served_change),
            share=float(served_change @ change) / max(float(change @ change), TINY),
            difference=_rms(self.results.log_p - tuned),
        )
        allowed = self._allowed(_rms(self.results.log_p_base - plain))
        noise = allowed / max(effect.effect * len(plain) ** 0.5, TINY)  # of the share
        ignored = effect.share < LEAST_SHARE and noise < LEAST_SHARE / 2
        if ignored or not effect.difference <= allowed:
            raise self._other(
                "does not apply the adapter as PEFT does: it changes log-probabilities by "
                f"{effect.served_effect:.3g} nats, PEFT by {effect.effect:.3g}, {effect.share:.0%} "
                f"of it in the same way; they are {effect.difference:.2g} apart and may be "
                f"{allowed:.2g}"
            )
        return effect

    @torch.no_grad()
    def answer_gap(self, model: Model) -> float:
        """Return the largest difference, nats, between the most likely token and the token of a
        server's answer."""
        gap = 0.0
        for prompt, answer in zip(self.questions.prompts, self.results.answers, strict=True):
            row = torch.tensor([prompt.prompt + answer], device=model.device)
            first = len(prompt.prompt)
            logits = model(input_ids=row).logits[0, first - 1 : -1].float()
            written = logits.gather(-1, row[0, first:, None])[:, 0]
            gap = max([gap, *(logits.amax(-1) - written).tolist()])
        apart = 0.0
        if self.rounded:
            apart = _rms(log_p(model, self.questions.compared) - self.results.log_p)
        allowed = 4 * self._allowed(apart)
        if not gap <= allowed:
            raise self._other(
                f"writes a greedy answer with a token that is {gap:.3g} nats less likely than the "
                f"most likely one in Transformers; {allowed:.2g} are allowed"
            )
        return gap

    def equal_answers(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the number of answers with the evaluation's text."""
        ends = set(self.questions.stop_ids)
        texts = [
            tokenizer.decode([t for t in answer if t not in ends], skip_special_tokens=True)
            for answer in self.results.answers
        ]
        return sum(t == answer for t, answer in zip(texts, self.reference.answers, strict=True))

    def _other(self, what: str) -> UserError:
        cure = "Take" if self.results.log_p_base is None else "Set export.merged to true; or take"
        if self.rounded:
            cure = "Choose a format of more bits (export.gguf), or take"
        return UserError(
            f"{self.setting}: {self.server} {what}. It serves another model than was exported. "
            f"{cure} another version of it, or leave out {self.setting}."
        )


@torch.no_grad()
def log_p(model: Model, documents: Iterable[Document]) -> Numbers:
    """Return log p of the trained tokens, (tokens,)."""
    rows = []
    for ids, mask in documents:
        row = torch.from_numpy(ids.astype("int64")).to(model.device)
        logits = model(input_ids=row[None]).logits[0, :-1].float()
        log_probs = torch.log_softmax(logits, dim=-1).gather(-1, row[1:, None])[:, 0]
        rows.append(log_probs.cpu().double().numpy()[mask[1:]])
    return np.concatenate(rows)


def _rms(values: Numbers) -> float:
    return float(np.sqrt(np.mean(values**2)))


def check_prompts(
    server: ModelServer, tokenizer: PreTrainedTokenizerBase, probes: Sequence[Probe]
) -> int:
    """Return the number of conversations and texts with equal token ids in both; raises `UserError`
    at a difference. Left out: tools, and content that is no text."""
    checked = 0
    for probe in probes:
        if probe.text is not None:
            served_ids, ids = server.text_ids(probe.text), probe.ids
        elif probe.messages is not None and _is_plain(probe):
            messages = _asking(probe.messages)
            served_ids = server.prompt_ids(messages)
            ids = _prompt_ids(tokenizer, messages)
        else:
            continue
        if served_ids != ids:
            raise UserError(
                f"{server.setting}: {server.name} writes {probe.described} as "
                f"{tokenizer.decode(served_ids)!r}, and Transformers as "
                f"{tokenizer.decode(ids)!r} (or the same text in other tokens). Leave out "
                f"{server.setting}, or take a newer {server.name}."
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
    """Return the messages up to the user's last one."""
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

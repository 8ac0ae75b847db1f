"""Sampling of answers, many at once, by a loaded model or by vLLM.

Each token is the inverse of the cumulated probabilities at a uniform number, which is a pure
function of seed, prompt, number of the answer and position: rounding aside, neither batches nor
processes nor restarts change an answer. vLLM gets a request for each answer, with a seed."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from workflow.lib.distributed.work_sharing import is_sharded
from workflow.lib.evaluation.batch_size import free_bytes
from workflow.lib.evaluation.questions import Model
from workflow.lib.evaluation.sample_answers import continue_rows, in_batches
from workflow.lib.evaluation.vllm_server import VllmServer
from workflow.lib.export.stock_models import decode_linear_, packed_linears
from workflow.lib.rounds.answers import Answer
from workflow.lib.settings.rounds import AnswersConfig

LARGEST = {"cuda": 256, "cpu": 64}  # answers at once: a step of one token each is short
AT_ONCE = 256  # of vLLM


@dataclass(frozen=True)
class Request:
    """An answer to sample: the prompt's token ids, the answer's number, and the seed."""

    prompt: Sequence[int]
    number: int
    seed: int

    @property
    def key(self) -> int:
        """A number of 128 bits that decides the answer."""
        content = np.array([self.seed, self.number, *self.prompt], dtype="<i8").tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Return the numbers in [0, 1) by which its tokens are drawn."""
        return np.random.Generator(np.random.Philox(key=self.key)).random(count)


@dataclass(frozen=True)
class Ends:
    """The ends of answers: tokens, and texts of the decoded answer."""

    ids: Sequence[int]
    texts: Sequence[str]
    tokenizer: PreTrainedTokenizerBase

    def ended(self, answer: Sequence[int]) -> bool:
        """Return whether the last token of an answer ends it."""
        if answer[-1] in self.ids:
            return True
        if not self.texts:
            return False
        last = list(answer[-4 * max(map(len, self.texts)) :])  # a character has up to 4 tokens
        text = str(self.tokenizer.decode(last))
        return any(end in text for end in self.texts)

    def cut(self, row: list[int], log_probs: list[float]) -> Answer:
        """Return the answer at the begin of a row."""
        end = next((n for n in range(1, len(row) + 1) if self.ended(row[:n])), None)
        return Answer(
            ids=row[:end],
            log_probs=log_probs[:end],
            finish="length" if end is None else "stop",
            text=str(self.tokenizer.decode(row[:end], skip_special_tokens=True)),
        )


@dataclass
class _Draw:
    """Draws the next token of each row, and notes its log-probability in `log_probs` (rows,
    positions) fp32. uniforms: the same shape."""

    uniforms: torch.Tensor
    temperature: float
    top_p: float
    log_probs: torch.Tensor

    def __call__(self, logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        uniform = self.uniforms.index_select(1, count)
        tokens = drawn_tokens(logits, uniform, temperature=self.temperature, top_p=self.top_p)
        self.log_probs.index_copy_(1, count, logits.float().log_softmax(-1).gather(1, tokens))
        return tokens


def decode_for_answers_(model: Model, device: torch.device) -> None:
    """Decode 4-bit linears once for all tokens where that takes at most half of the free memory;
    the rest is for keys and values."""
    linears = {} if is_sharded(model) else packed_linears(model)
    size = sum(
        x.in_features * x.out_features * x.weight.quant_state.dtype.itemsize
        for x in linears.values()
    )
    if device.type == "cuda" and 2 * size <= free_bytes(device):
        for path in linears:
            decode_linear_(model, path)


def drawn_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, *, temperature: float, top_p: float
) -> torch.Tensor:
    """Return the tokens (rows, 1) at which the cumulated probabilities of logits (rows, vocabulary)
    pass `uniform` (rows, 1), the likeliest first. top_p: the probability of those that count, of
    which the last one reaches it."""
    highest, order = logits.sort(dim=-1, descending=True, stable=True)
    likeliest = (highest.double() / temperature).softmax(-1)
    upto = likeliest.cumsum(-1)
    counting = (upto - likeliest < top_p).sum(-1, keepdim=True)
    mass = upto.gather(1, counting - 1)
    drawn = torch.searchsorted(upto, uniform * mass, right=True)
    return order.gather(1, torch.minimum(drawn, counting - 1))


def sample(
    model: Model,
    requests: Sequence[Request],
    settings: AnswersConfig,
    *,
    ends: Ends,
    device: torch.device,
    on_answers: Callable[[int, int], None],
) -> list[Answer]:
    """Return an answer for each request. on_answers: called with the numbers of new answers and
    tokens."""
    most = settings.max_new_tokens

    def answers(numbers: list[int]) -> list[Answer]:
        batch = [requests[number] for number in numbers]
        uniforms = torch.from_numpy(np.stack([request.uniforms(most) for request in batch]))
        log_probs = torch.zeros(uniforms.shape, device=device)
        rows = continue_rows(
            model,
            [list(request.prompt) for request in batch],
            stop_ids=ends.ids,
            max_new_tokens=most,
            device=device,
            pick=_Draw(uniforms.to(device), settings.temperature, settings.top_p, log_probs),
            ended=ends.ended if ends.texts else None,
        )
        pairs = zip(rows, log_probs.tolist(), strict=True)
        cut = [ends.cut(row, values[: len(row)]) for row, values in pairs]
        on_answers(len(cut), sum(len(answer.ids) for answer in cut))
        return cut

    prompts = [request.prompt for request in requests]
    return in_batches(answers, model, prompts, max_new_tokens=most, device=device, largest=LARGEST)


def sample_served(
    server: VllmServer,
    requests: Sequence[Request],
    settings: AnswersConfig,
    *,
    model: str,
    ends: Ends,
    on_answers: Callable[[int, int], None],
) -> list[Answer]:
    """Return an answer for each request, as `sample` does. model: `BASE`, or the name of
    an adapter. Raises `UserError` if the server ends."""

    def sampled(request: Request) -> Answer:
        choice = server.continued(
            request.prompt,
            model,
            **settings.model_dump(include={"temperature", "top_p", "stop"}),
            max_tokens=settings.max_new_tokens,
            stop_token_ids=ends.ids,
            seed=request.key >> 65,  # of 63 bits
            logprobs=0,
            return_token_ids=True,
        )
        return ends.cut(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    answers, pool = [], ThreadPoolExecutor(AT_ONCE)
    try:
        for answer in pool.map(sampled, requests):
            on_answers(1, len(answer.ids))
            answers.append(answer)
    finally:  # of an interrupted stage the server ends first, and with it the requests
        pool.shutdown(wait=False, cancel_futures=True)
    return answers

"""llama.cpp's own server (`xllamacpp`, envs/gguf.txt), which runs in this process.

Its log-probabilities are of the token behind a prompt, so each token is asked for by itself."""

import json
import math
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workflow.lib.evaluation.sample_answers import until_stop
from workflow.lib.system.errors import UserError

PACKAGE = "xllamacpp"
BIAS = 1e6  # on one logit: no other token is written


class LlamaCppServer:
    """A running model; it ends with the object."""

    name, setting = "llama.cpp", "export.gguf"

    def __init__(
        self,
        path: Path,
        *,
        adapter: Path | None,
        vocab_size: int,
        context_tokens: int,
        threads: int,
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
        self._letter, self._vocab_size = self.text_ids("a")[-1], vocab_size

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

    def answer(
        self, prompt: Sequence[int], *, most: int, stop_ids: Sequence[int], model: str = ""
    ) -> list[int]:
        """Return the greedy continuation, with the token that ended it if one did."""
        how = {"n_predict": most, "temperature": 0.0, "return_tokens": True}
        tokens: list[int] = self._ask("/completion", prompt=prompt, **how)["tokens"]
        return until_stop(tokens, stop_ids)

    def log_probabilities(
        self, ids: Sequence[int], places: Iterable[int], *, model: str = ""
    ) -> list[float]:
        """Return log p, nats, of the tokens at these places, after those before them."""
        return [self._log_probability(ids[:place], ids[place]) for place in places]

    def _log_probability(self, prompt: Sequence[int], target: int) -> float:
        """Of a token that is part of a character, the server (of 2026-10) returns nothing where it
        is the one that is written: then a letter is, and the target is looked up among all."""
        if found := self._probabilities(prompt, written=target, count=1):
            return float(found["logprob"])
        candidates = self._probabilities(prompt, written=self._letter, count=self._vocab_size)
        by_token = {entry["id"]: float(entry["logprob"]) for entry in candidates["top_logprobs"]}
        return by_token.get(target, -math.inf)

    def _probabilities(self, prompt: Sequence[int], *, written: int, count: int) -> dict[str, Any]:
        """Return what the server says of the token that it is made to write and of the `count` most
        likely ones; nothing where that token is part of a character. It is made to by a bias, and
        the probabilities are those before the bias."""
        how = {"n_predict": 1, "temperature": 0.0, "logit_bias": [[written, BIAS]]}
        found = self._ask("/completion", prompt=prompt, n_probs=count, **how)
        entries: list[dict[str, Any]] = found.get("completion_probabilities") or [{}]
        return entries[0]

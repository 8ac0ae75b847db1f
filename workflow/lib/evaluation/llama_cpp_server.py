"""A GGUF file as llama.cpp runs it: its own server, in this process, asked over the loopback
interface.

The server comes with the package `xllamacpp` (envs/gguf.txt). Its log-probabilities are of the
token that follows a prompt, so a loss asks once a position; what a prompt shares with the one
before is kept.
"""

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import UserError

PACKAGE = "xllamacpp"


class LlamaCppServer:
    """A running model; it ends with the object."""

    def __init__(self, path: Path, *, context_tokens: int) -> None:
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
        self._server = xllamacpp.Server(params)
        # no proxy stands between a process and itself
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, path: str, **question: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._server.listening_address}{path}",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with self._opener.open(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation that asks for an answer, by the file's own
        template.
        """
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
        """Return (log p of `target` after a prompt, the most likely token)."""
        found = self._ask(
            "/completion", prompt=prompt, n_predict=1, temperature=0.0, n_probs=vocab_size
        )
        candidates = found["completion_probabilities"][0]["top_logprobs"]
        by_token = {entry["id"]: float(entry["logprob"]) for entry in candidates}
        return by_token.get(target, -math.inf), candidates[0]["id"]

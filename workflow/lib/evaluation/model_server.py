"""A server of models as a process of its own, with an OpenAI interface.

It listens on a Unix socket in a private folder: no port can be taken, and nobody else can send
requests. It ends with the block, by its process group. If this process is killed, its pipe closes,
and `GUARD` ends the group."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import threads_of_job
from workflow.lib.system.locks import temporary_folder

logger = logging.getLogger("workflow")

BASE = "base"  # name of the model without an adapter
QUIET_S = 900.0  # without output before it is ready, or without an answer
POLL_S, GRACE_S = 0.25, 20.0
GUARD = ("/bin/sh", "-c", "read _; kill -KILL 0")
SHOWN_LINES, LOGGED_LINES = 6, 400  # of its last output
CURE = "Set export.merged to true, which needs no adapter in the server, or export.serve to none."
OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables of this environment


@dataclass(frozen=True, kw_only=True)
class Start(ABC):
    """The start of a server. setting: that requires it; cure: what to set instead, if it refuses;
    quiet_s: bound of its silence, seconds."""

    setting: str = "export.serve"
    cure: str = CURE
    quiet_s: float = QUIET_S
    environment: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def command(self, address: Path) -> list[str]:
        """Return the command of a server that listens on the socket `address`."""


class ModelServer(ABC):
    """A running server. Each request raises `UserError`: with the server's words if it refuses,
    with its last lines if it has ended. model: `BASE`, or the name of an adapter."""

    name: ClassVar[str]

    def __init__(
        self, process: "subprocess.Popen[bytes]", address: Path, log: Path, *, start: Start
    ) -> None:
        self._process, self._address, self._log = process, address, log
        self._quiet_s, self.setting, self._cure = start.quiet_s, start.setting, start.cure

    @property
    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without first and last special tokens."""

    @abstractmethod
    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation up to its answer, by the server's template."""

    @abstractmethod
    def log_probabilities(
        self, ids: Sequence[int], positions: Sequence[int], *, model: str
    ) -> list[float]:
        """Return log p, nats, of the tokens at these positions, after those before them."""

    @abstractmethod
    def answer(
        self, prompt: Sequence[int], *, model: str, most: int, stop_ids: Sequence[int]
    ) -> list[int]:
        """Return the greedy continuation, with the token that ended it if one did."""

    def ask(self, method: str, path: str, **question: Any) -> dict[str, Any]:
        """Return the answer, a JSON object."""
        content = self.send(method, path, **question)
        try:
            return dict(json.loads(content))
        except ValueError:
            text = content[:100].decode(errors="replace")
            raise self.failed(f"answered {path} by no JSON ({text!r})") from None

    def send(self, method: str, path: str, *, refusing: bool = False, **question: Any) -> bytes:
        """Return the answer; refusing: whether an error within the server is a refusal."""
        try:
            status, content = self._request(method, path, question)
        except TimeoutError:
            raise self.failed(f"did not answer {path} within {self._quiet_s:g} s") from None
        except (OSError, http.client.HTTPException):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            raise self.failed(f"ended while it was asked {path}") from None
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and not refusing:
            raise self.failed(f"failed when it was asked {path} ({_reason(content)})")
        if status != http.HTTPStatus.OK:
            raise UserError(
                f"{self.setting}: the server refuses {path}: {_reason(content)}. {self._cure}"
            )
        return content

    def wait(self) -> None:
        """Wait until it is ready."""
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
        """Return the error with `what` and the server's last lines."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        logger.debug("last lines of %s:\n%s", self.name, "\n".join(lines[-LOGGED_LINES:]))
        # errors after the first cause are of other processes, which lost the first one
        telling = [
            line for line in lines if re.search(r"Error\b|error:|^\S+ E |[Oo]ut of memory", line)
        ]
        shown = "\n  ".join((telling or lines or ["(it said nothing)"])[-SHOWN_LINES:])
        if self._process.poll() == -signal.SIGKILL:
            what += ": it was killed, most likely for want of memory"
        return UserError(
            f"{self.setting}: {self.name} {what}. Its last lines (more in the log):\n  {shown}\n"
            f"Free memory or mend what they name; or leave out {self.setting}."
        )


Server = TypeVar("Server", bound=ModelServer)


@contextmanager
def running(kind: type[Server], start: Start) -> Iterator[Server]:
    """Start a server, wait until it is ready, and end all its processes with the block."""
    # the path of a socket has 107 bytes at most
    with temporary_folder("served-", parent="/tmp") as folder:
        address, log = folder / "server.sock", folder / "log"
        own = {name: value for name, value in os.environ.items() if name not in OTHERS}
        own["TMPDIR"] = str(folder)  # vLLM leaves sockets and a file there
        with (
            log.open("wb") as file,
            subprocess.Popen(GUARD, stdin=subprocess.PIPE, process_group=0) as guard,
            subprocess.Popen(
                start.command(address),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=own | dict(start.environment) | {"OMP_NUM_THREADS": str(threads_of_job())},
                process_group=guard.pid,
            ) as process,
        ):
            try:
                server = kind(process, address, log, start=start)
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

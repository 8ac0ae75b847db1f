"""A program that stands for vLLM's server: its options, its interface on a Unix socket, and what
may go wrong (`FAKE_VLLM`). Its log-probabilities are those of `LOG_P`. It samples tokens by the
seed of a request."""

import http.server
import itertools
import json
import os
import random
import signal
import socketserver
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOG_P = -0.5
MIXED = "--enable-mixed-moe-lora-format"
ASKED = itertools.count(1)


def fake_python(folder):
    """Write a program that starts it as if it were vLLM's Python; return its path."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    python.chmod(0o755)
    return python


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "socket"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.say({"version": "9.9"})

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            if "refused" in question["lora_path"]:
                error = {"message": "LoRA rank 999 is greater than max_lora_rank 8."}
                return self.say({"error": error}, status=400)
            if MIXED in sys.argv and not question["is_3d_lora_weight"]:
                error = {"message": "the adapter contains fused 3D MoE weights"}
                return self.say({"error": error}, status=400)
            return self.say(f"Success: {question['lora_name']}")
        if self.path == "/tokenize":
            return self.say({"tokens": [len(str(question.get("prompt")))]})
        if MODE == "dies" and next(ASKED) > int(os.environ.get("FAKE_VLLM_ANSWERS", 0)):
            print("torch.OutOfMemoryError: no room", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "silent":
            time.sleep(3600)
        if MODE == "no JSON":
            return self.send(b"the engine is gone")
        if MODE == "cut":
            self.send(b"{", promised=100)
            os.kill(os.getpid(), signal.SIGKILL)
        ids = question["prompt"]
        if "seed" in question:
            return self.say({"choices": [sampled(question)]})
        said = [None, *({str(i): {"logprob": LOG_P, "rank": 1}} for i in ids[1:])]
        choice = {"prompt_logprobs": said, "token_ids": [7, 2]}
        return self.say({"choices": [choice]})

    def say(self, content, status=200):
        self.send(json.dumps(content).encode() if content else b"", status)

    def send(self, body, status=200, *, promised=None):
        """promised: bytes that it says it sends."""
        self.send_response(status)
        self.send_header("Content-Length", str(promised or len(body)))
        self.end_headers()
        self.wfile.write(body)


def sampled(question):
    draw = random.Random(f"{question['seed']} {question['model']}")
    ids = [draw.randrange(3, 50) for _ in range(draw.randint(1, question["max_tokens"]))]
    if len(ids) < question["max_tokens"]:
        ids.append(question["stop_token_ids"][0])
    return {"token_ids": ids, "logprobs": {"token_logprobs": [LOG_P * id for id in ids]}}


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, request_queue_size = True, 2048  # as uvicorn


MODE = os.environ.get("FAKE_VLLM", "")

if __name__ == "__main__":
    child = subprocess.Popen(["sleep", "3600"])  # as vLLM has its engine
    Path(os.environ["FAKE_VLLM_PIDS"]).write_text(f"{os.getpid()} {child.pid}\n")
    socket = Path(tempfile.gettempdir()) / "left-by-the-server"
    socket.touch()
    Path(os.environ["FAKE_VLLM_PIDS"]).with_name("temporary").write_text(str(socket))
    print("starting", " ".join(sys.argv[1:]), flush=True)
    if MODE == "fails":
        print("ValueError: no such model type\nthe engine did not start", flush=True)
        sys.exit(1)
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "never":
        time.sleep(3600)
    Server(option("--uds"), Handler).serve_forever()

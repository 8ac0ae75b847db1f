"""Peak memory of data preparation against the size of its file: the stage in processes of its own,
watched from outside.

Not collected by pytest. A file of chat messages with drawn words is written line by line, the stage
runs on it, and the proportional set
sizes of all its processes are added up some times a second: all of them, and the part that is no
mapped file, which the system cannot take back. `python -m tests.support.measure_memory --megabytes
64 128 256 [--row-words 300 | --token-rows] [--processes N]`; rows of token ids
take a fifth of the time, and about 195 bytes each: they show what a row costs.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from workflow.lib.settings.config import DataConfig

BASE = Path("workflow/resources/base")
WORDS = Path("workflow/resources/pydocs/train.jsonl.gz")
SEQ_LEN = 1024
PAUSE_SECONDS = 0.3
TOKEN_BLOCK = 997  # rows of token ids of one length behind each other


def write_messages(path: Path, *, size: int, row_words: int) -> int:
    """Write at least `size` bytes of conversations of about `row_words` words; return how many."""
    words = sorted(set(gzip.decompress(WORDS.read_bytes()).decode().replace('"', " ").split()))
    draw, rows, written = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            texts = [" ".join(draw.choices(words, k=max(1, row_words // 2))) for _ in range(2)]
            turns = zip(("user", "assistant"), texts, strict=True)
            row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            written += file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def write_token_rows(path: Path, *, size: int) -> int:
    """Write at least `size` bytes of rows of 16 to 55 drawn token ids, of which 2% repeat another;
    return how many.
    """
    draw, rows, written = np.random.default_rng(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            ids = draw.integers(100, 1000, size=(TOKEN_BLOCK, int(draw.integers(16, 56))))
            ids[: TOKEN_BLOCK // 50] = ids[TOKEN_BLOCK // 50 : 2 * (TOKEN_BLOCK // 50)]
            lines = (f'{{"input_ids": {row}}}\n' for row in ids.tolist())
            written += file.write("".join(lines))
            rows += len(ids)
    return rows


def proportional_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return the proportional set size of a process and its children: all of it, and what is no
    file.
    """
    total, anonymous = 0, 0
    for one in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        except OSError:  # it ended
            continue
        fields = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
        total += int(fields["Pss"]) * 1024
        anonymous += int(fields["Pss_Anon"]) * 1024
    return total, anonymous


def peak_of(command: list[str]) -> tuple[int, int]:
    """Run a command; return the highest proportional bytes seen, all and anonymous."""
    peaks = (0, 0)
    with subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as run:
        while run.poll() is None:
            try:
                seen = proportional_bytes(psutil.Process(run.pid))
            except psutil.NoSuchProcess:
                break
            peaks = (max(peaks[0], seen[0]), max(peaks[1], seen[1]))
            time.sleep(PAUSE_SECONDS)
    if run.returncode:
        raise SystemExit(f"the stage failed with status {run.returncode}")
    return peaks


def measure(
    folder: Path, *, size: int, row_words: int | None, processes: int
) -> tuple[int, int, int]:
    """Return rows, and the peaks of preparing a file of `size` bytes; `row_words` None = rows of
    token ids.
    """
    data = folder / "rows.jsonl"
    settings = DataConfig(train=str(data), heldout=None, heldout_share=0.01, seq_len=SEQ_LEN)
    if row_words is None:
        rows = write_token_rows(data, size=size)
        settings = settings.model_copy(update={"format": "tokens", "loss_on": "all"})
    else:
        rows = write_messages(data, size=size, row_words=row_words)
    config = json.dumps({"data": settings.model_dump(mode="json")})
    command = [sys.executable, "-m", "workflow.scripts.tokenize_dataset", "--config", config,
               "--tokenizer", str(BASE), "--output", str(folder / "tokens"),
               "--processes", str(processes), "--log", str(folder / "log")]  # fmt: skip
    return rows, *peak_of(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--row-words", type=int, default=300)
    parser.add_argument("--token-rows", action="store_true", help="rows of token ids, not of words")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    points = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            rows, total, anonymous = measure(
                Path(folder),
                size=megabytes * 2**20,
                row_words=None if args.token_rows else args.row_words,
                processes=args.processes,
            )
        points.append((rows, total, anonymous))
        print(
            f"{megabytes} MiB, {rows} rows, {time.monotonic() - began:.0f} s: peak "
            f"{total / 2**20:.0f} MiB, "
            f"of it no file {anonymous / 2**20:.0f} MiB",
            flush=True,
        )
    if len(points) > 1:
        slopes = [np.polyfit([p[0] for p in points], [p[i] for p in points], 1)[0] for i in (1, 2)]
        print(f"bytes per row: {slopes[0]:.0f} in all, {slopes[1]:.0f} that are no file")


if __name__ == "__main__":
    main()

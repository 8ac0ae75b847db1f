"""Rows per second from a raw JSON Lines file to packed training rows: this workflow, TRL and
axolotl, side by side.

Not collected by pytest. All read the same file of chat messages, use the same tokenizer and chat
template, mask all but the assistant's turns, pack, and write their result to disk, on the same
number of processes. axolotl writes its documents and decides which go together; its rows are put
together while it trains, which is not timed. Imports are not timed, everything from opening the
file on is; the repetitions alternate, so a change of the machine's load meets all; processor
seconds of all processes are shown too, which feel that load less. TRL and axolotl live in
environments of their own: `python -m tests.support.measure_tokenization --trl PYTHON --axolotl
PYTHON [--copies N] [--repeat N]`.

`--rows N` measures this workflow alone, with the settings of a user (5% held out, near-duplicates
removed) on N short conversations: seconds, rows per second and the largest memory of all processes
together (proportional set size, sampled).
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

import psutil

BASE = Path("workflow/resources/base")
SEQ_LEN = 1024


def write_messages(source: Path, target: Path, *, rows: int | None, copies: int) -> int:
    """Write the pairs of `source` as conversations, `copies` times with their words in new orders,
    or as often as gives `rows`; return the count.
    """
    pairs = [
        json.loads(line) for line in gzip.decompress(source.read_bytes()).decode().splitlines()
    ]
    draw = random.Random(0)

    def shuffled(text: str) -> str:
        words = text.split()
        return " ".join(draw.sample(words, len(words)))

    count = copies * len(pairs) if rows is None else rows
    with target.open("w", encoding="utf-8") as file:
        for pair in islice(cycle(pairs), count):
            turns = [("user", pair["prompt"]), ("assistant", pair["completion"])]
            messages = [{"role": role, "content": shuffled(text)} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return count


class Clock:
    """Adds up the seconds inside it: by the wall, and of the processors of this process and its
    ended children.
    """

    def __init__(self) -> None:
        self.wall = self.processors = 0.0

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        wall, processors = self._now()
        self.wall += wall - self._began[0]
        self.processors += processors - self._began[1]

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), sum(os.times()[:4])


class Memory:
    """The largest memory of this process and its children together while it is inside, MiB.

    Pages that they share count once.
    """

    def __enter__(self) -> Self:
        self.largest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.25):
            total = 0
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.largest = max(self.largest, total / 2**20)


def measure_rows(data: Path, rows: int, processes: int) -> None:
    """Run the stage on `rows` rows with a user's settings; print seconds and memory."""
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        clock = time_ours(data, Path(folder), processes, heldout_share=0.05)
    print(
        f"{rows:,} rows on {processes} processes: {clock.wall:.0f} s, {rows / clock.wall:,.0f} "
        f"rows/s, {clock.processors:.1f} processor seconds, {memory.largest:,.0f} MiB at most"
    )


def time_ours(data: Path, folder: Path, processes: int, **changed: float) -> Clock:
    """Run the stage's own main; all but `changed` settings are those that the peers can match."""
    from workflow.lib.data.encoding.tokenizer import load_tokenizer
    from workflow.lib.settings.config import DataConfig
    from workflow.scripts.tokenize_dataset import main

    load_tokenizer(BASE)  # imports what TRL's side has imported too before its clock starts
    settings = DataConfig.model_validate(
        {"train": str(data), "heldout": None, "heldout_share": 0.001, "seq_len": SEQ_LEN} | changed
    )
    args = argparse.Namespace(
        config={"data": settings.model_dump(mode="json")},
        dataset=Path(),
        tokenizer=BASE,
        output=folder / "tokens",
        processes=processes,
    )
    clock = Clock()
    with clock:
        main(args)
    return clock


def time_trl(data: Path, folder: Path, processes: int) -> Clock:
    """Load the file with `datasets`, and let SFTTrainer prepare it; the model is there before."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    clock = Clock()

    class Timed(SFTTrainer):  # type: ignore[misc]  # the package is not in this environment
        def _prepare_dataset(self, *args: object, **kwargs: object) -> object:
            with clock:
                return super()._prepare_dataset(*args, **kwargs)

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    settings = SFTConfig(
        output_dir=str(folder / "trainer"),
        max_length=SEQ_LEN,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=processes,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    with clock:
        dataset = load_dataset("json", data_files=str(data), split="train")
    trainer = Timed(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    print(f"{len(trainer.train_dataset)} packed rows", file=sys.stderr)
    return clock


def time_axolotl(data: Path, folder: Path, processes: int) -> Clock:
    """Prepare the file as `axolotl preprocess` does, and pack it as its trainer does."""
    import numpy as np
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.loaders import load_tokenizer
    from axolotl.utils.data import prepare_datasets
    from axolotl.utils.samplers import MultipackBatchSampler, get_dataset_lengths
    from torch.utils.data import RandomSampler

    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump(axolotl_settings(data, folder, processes)), encoding="utf-8")
    with contextlib.redirect_stdout(sys.stderr):
        settings = load_cfg(str(path), is_preprocess=True)
    settings.is_preprocess = True
    tokenizer = load_tokenizer(settings)

    def packed(documents: Any, lengths: Any) -> list[Any]:
        return list(
            MultipackBatchSampler(
                sampler=RandomSampler(documents),
                lengths=lengths,
                batch_size=1,
                batch_max_len=SEQ_LEN,
                group_size=settings.sample_packing_group_size,
                bin_size=settings.sample_packing_bin_size,
                num_processes=processes,
            )
        )

    packed(range(9), np.full(9, 100))  # compiles it
    clock = Clock()
    with clock, contextlib.redirect_stdout(sys.stderr):
        documents, *_ = prepare_datasets(settings, tokenizer)
        rows = packed(documents, get_dataset_lengths(documents))
    print(f"{len(rows)} packed rows of {len(documents)} documents", file=sys.stderr)
    return clock


def axolotl_settings(data: Path, folder: Path, processes: int) -> dict[str, object]:
    """What axolotl needs to know, in its own words."""
    source = {"path": str(data), "ds_type": "json", "type": "chat_template"}
    roles = {"field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
    return {
        "base_model": str(BASE.resolve()),
        "datasets": [source | roles],
        "chat_template": "tokenizer_default",
        "sequence_len": SEQ_LEN,
        "sample_packing": True,
        "val_set_size": 0.0,
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": processes,
        "output_dir": str(folder / "output"),
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "optimizer": "adamw_torch",
        "attn_implementation": "sdpa",
    }


TIMED = {"ours": time_ours, "trl": time_trl, "axolotl": time_axolotl}


def measure(name: str, python: str, data: Path, processes: int) -> tuple[float, float]:
    """Time one preparation in a fresh process with fresh caches; return wall and processor
    seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {"HF_HOME": folder, "HF_DATASETS_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        caches |= {"AXOLOTL_IS_PREPROCESS": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
        run = subprocess.run(
            [python, "-m", "tests.support.measure_tokenization", "--data", str(data), "--one", name,
             "--folder", folder, "--processes", str(processes)],
            env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        wall, processors = run.stdout.split()[-2:]
        return float(wall), float(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path("workflow/resources/pydocs/train.jsonl.gz")
    )
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rows", type=int, help="short rows to measure this workflow alone on")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trl", help="python that has TRL")
    parser.add_argument("--axolotl", help="python that has axolotl")
    parser.add_argument("--one", choices=TIMED, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        clock = TIMED[args.one](args.data, args.folder, args.processes)
        print(clock.wall, clock.processors)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "messages.jsonl"
        rows = write_messages(args.data, data, rows=args.rows, copies=args.copies)
        if args.rows is not None:
            measure_rows(data, rows, args.processes)
            return
        pythons = {"ours": sys.executable, "trl": args.trl, "axolotl": args.axolotl}
        taken: dict[str, list[tuple[float, float]]] = {n: [] for n, p in pythons.items() if p}
        for number in range(args.repeat):
            for name, seconds in taken.items():
                seconds.append(measure(name, pythons[name], data, args.processes))
            print(f"run {number + 1}:", "; ".join(shown(taken, name, rows) for name in taken))
        for name in list(taken)[1:]:
            print(f"median ratios to {name}:", *(f"{m:.2f}" for m in median_ratios(taken, name)))


def shown(taken: dict[str, list[tuple[float, float]]], name: str, rows: int) -> str:
    """One line on the last run of `name`."""
    wall, processors = taken[name][-1]
    return f"{name} {rows / wall:,.0f} rows/s, {processors:.1f} processor seconds"


def median_ratios(taken: dict[str, list[tuple[float, float]]], name: str) -> list[float]:
    """How many times as long `name` took as this workflow, by wall and by processor seconds."""
    pairs = list(zip(taken[name], taken["ours"], strict=True))
    return [statistics.median(other[i] / ours[i] for other, ours in pairs) for i in (0, 1)]


if __name__ == "__main__":
    main()

"""Rows per second from a raw JSON Lines file to packed training rows: this workflow and TRL, side by side.

Not collected by pytest. Both read the same file of chat messages, use the same tokenizer and chat template, mask
all but the assistant's turns, pack by best fit, and write their result to disk, on the same number of
processes. Imports are not timed, everything from opening the file on is; the repetitions alternate, so a change
of the machine's load meets both; processor seconds of all processes are shown too, which feel that load less. TRL lives in an environment of its own:
`python -m tests.measure_tokenization --data FILE --other PYTHON [--copies N] [--repeat N]`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE = Path("workflow/resources/base")
SEQ_LEN = 1024


def write_messages(source: Path, target: Path, *, copies: int) -> int:
    """Write the pairs of `source` as conversations, `copies` times with their words in new orders; return the count."""
    pairs = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    draw = random.Random(0)

    def shuffled(text: str) -> str:
        words = text.split()
        return " ".join(draw.sample(words, len(words)))

    with target.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            for pair in pairs:
                turns = [("user", pair["prompt"]), ("assistant", pair["completion"])]
                messages = [{"role": role, "content": shuffled(text)} for role, text in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
    return copies * len(pairs)


class Clock:
    """Adds up the seconds inside it: by the wall, and of the processors of this process and its ended children."""

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


def time_ours(data: Path, folder: Path, processes: int) -> Clock:
    """Run the stage's own main."""
    from workflow.lib.config import DataConfig
    from workflow.lib.tokenizer import load_tokenizer
    from workflow.scripts.tokenize_dataset import main

    load_tokenizer(BASE)  # imports what TRL's side has imported too before its clock starts
    settings = DataConfig(
        train=str(data), heldout=None, heldout_share=0.001, seq_len=SEQ_LEN, near_duplicates="keep"
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


TIMED = {"ours": time_ours, "trl": time_trl}


def measure(name: str, python: str, data: Path, processes: int) -> tuple[float, float]:
    """Time one preparation in a fresh process with fresh caches; return wall and processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"HF_HOME": folder, "HF_DATASETS_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(
            [python, "-m", "tests.measure_tokenization", "--data", str(data), "--one", name,
             "--folder", folder, "--processes", str(processes)],
            env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        wall, processors = run.stdout.split()[-2:]
        return float(wall), float(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("workflow/resources/pydocs/train.jsonl"))
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--other", default=sys.executable, help="python that has TRL")
    parser.add_argument("--one", choices=TIMED, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        clock = TIMED[args.one](args.data, args.folder, args.processes)
        print(clock.wall, clock.processors)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "messages.jsonl"
        rows = write_messages(args.data, data, copies=args.copies)
        ratios = []
        for _ in range(args.repeat):
            wall, processors = measure("ours", sys.executable, data, args.processes)
            other_wall, other_processors = measure("trl", args.other, data, args.processes)
            ratios.append((other_wall / wall, other_processors / processors))
            print(
                f"ours {rows / wall:,.0f} rows/s, TRL {rows / other_wall:,.0f}, ratio {ratios[-1][0]:.2f}; "
                f"processor seconds {processors:.1f} and {other_processors:.1f}, ratio {ratios[-1][1]:.2f}"
            )
        medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
        print(f"median ratios {medians[0]:.2f} and {medians[1]:.2f} over {rows} rows")


if __name__ == "__main__":
    main()

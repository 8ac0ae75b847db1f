"""Rows per second from a raw JSON Lines file to packed training rows: this workflow and TRL, side by side.

Not collected by pytest. Both read the same file of chat messages, use the same tokenizer and chat template, mask
all but the assistant's turns, pack by best fit, and write their result to disk, on the same number of
processes. Imports are not timed, everything from opening the file on is; the repetitions alternate, so a change
of the machine's load meets both. TRL lives in an environment of its own:
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


def time_ours(data: Path, folder: Path, processes: int) -> float:
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
    began = time.monotonic()
    main(args)
    return time.monotonic() - began


def time_trl(data: Path, folder: Path, processes: int) -> float:
    """Load the file with `datasets`, and let SFTTrainer prepare it; the model is there before."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Timed(SFTTrainer):  # type: ignore[misc]  # the package is not in this environment
        seconds = 0.0

        def _prepare_dataset(self, *args: object, **kwargs: object) -> object:
            began = time.monotonic()
            prepared = super()._prepare_dataset(*args, **kwargs)
            type(self).seconds += time.monotonic() - began
            return prepared

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
    began = time.monotonic()
    dataset = load_dataset("json", data_files=str(data), split="train")
    loaded = time.monotonic() - began
    trainer = Timed(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    print(f"{len(trainer.train_dataset)} packed rows", file=sys.stderr)
    return loaded + Timed.seconds


TIMED = {"ours": time_ours, "trl": time_trl}


def measure(name: str, python: str, data: Path, processes: int) -> float:
    """Time one preparation in a fresh process with fresh caches; return seconds."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"HF_HOME": folder, "HF_DATASETS_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(
            [python, "-m", "tests.measure_tokenization", "--data", str(data), "--one", name,
             "--folder", folder, "--processes", str(processes)],
            env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return float(run.stdout.split()[-1])


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
        print(TIMED[args.one](args.data, args.folder, args.processes))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "messages.jsonl"
        rows = write_messages(args.data, data, copies=args.copies)
        ratios = []
        for _ in range(args.repeat):
            ours = measure("ours", sys.executable, data, args.processes)
            other = measure("trl", args.other, data, args.processes)
            ratios.append(other / ours)
            print(
                f"ours {rows / ours:,.0f} rows/s, TRL {rows / other:,.0f}, ratio {ratios[-1]:.2f}"
            )
        print(f"median ratio {statistics.median(ratios):.2f} over {rows} rows")


if __name__ == "__main__":
    main()

"""What a recovery adapter wins back of a model's NF4 base, beside calibration, and what is left of
it after training: `python -m tests.support.recovery_figures MODEL FOLDER`.

The workflow itself runs in FOLDER, and goes on where it was. The base learns on chats about Python
and on documents of packages; it is measured on licences, of which it has seen nothing, and on other
chats."""

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.evaluation.task_scores import estimate_ratio
from workflow.lib.settings.subjects import SubjectName

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "workflow" / "resources" / "pydocs"
LICENCES = Path("/usr/share/common-licenses")
LICENCE_WORDS = re.compile(
    "permission is hereby granted|general public license|redistribution and use|apache license"
    "|without warrant",
    re.IGNORECASE,
)
RUNS: dict[str, dict[str, Any]] = {
    "absmax": {"recovery_steps": 0},
    "calibrated": {"recovery_steps": 0, "method": "calibrated"},
    "recovered": {},
    "both": {"method": "calibrated"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the 16-bit model")
    parser.add_argument("folder", type=Path, help="folder to work in")
    parser.add_argument("--steps", type=int, default=20, help="of the recovery")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--cores", default="all", help="as Snakemake's")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write_texts(args.folder)
    runs = dict.fromkeys(["absmax", *args.runs])
    document = settings(args.model.absolute(), args.steps, runs)
    (args.folder / "config.yaml").write_text(json.dumps(document))
    command = ["snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", args.cores]
    subprocess.run([sys.executable, "-m", *command, "evaluate"], cwd=args.folder, check=True)
    for line in figures(args.folder, runs):
        print(line)


def settings(model: Path, steps: int, runs: Iterable[str]) -> dict[str, Any]:
    return {
        "model": {"name": "measured", "source": str(model)},
        "data": {
            "name": "chats",
            "train": "chats-trained.jsonl",
            "heldout": [{"path": f"{name}.jsonl", "name": name} for name in ("licences", "chats")],
            "loss_on": "all",
            "overlong": "split",
        },
        "quantize": {
            "calibration_text": "calibration.txt",
            "recovery_steps": steps,
            "recovery_text": ["documents.jsonl", "chats-recovery.jsonl"],
        },
        "train": {
            "epochs": None,
            "max_steps": 50,
            "global_batch_size": 4,
            "learning_rate": 5e-4,
            "checkpoint_every_steps": 5,
        },
        "hardware": {"cpu_processes": 1},
        "evaluate": {"tasks": [], "tasks_dir": None, "samples": 0},
        "runs": {name: {"quantize": RUNS[name]} for name in runs},
    }


def write_texts(folder: Path) -> None:
    chats, held = (
        [
            json.loads(line)
            for line in gzip.decompress((CHATS / f"{name}.jsonl.gz").read_bytes()).splitlines()
        ]
        for name in ("train", "heldout")
    )
    documents = [text for text in map(read, package_documents()) if is_prose(text)]
    licences = [read(path) for path in sorted(LICENCES.iterdir()) if not path.is_symlink()]
    parts = [text[i : i + 1000] for text in licences for i in range(0, len(text) - 1000, 10_000)]
    rows = {
        "chats-trained": chats[1500:2700],
        "chats-recovery": chats[:450],
        "chats": held[:24],
        "documents": [{"text": text[:2000]} for text in documents[::4][:60]],
        "licences": [{"text": part} for part in parts[:24]],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "calibration.txt").write_text("\n\n".join(t[:2500] for t in documents[1::4][:60]))


def package_documents() -> list[Path]:
    return sorted(
        [
            *(p for p in Path("/usr/share/doc").rglob("README*") if p.suffix != ".gz"),
            *Path(sys.prefix).rglob("*.dist-info/METADATA"),
        ]
    )


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def is_prose(text: str) -> bool:
    return len(text) > 400 and not LICENCE_WORDS.search(text)


def figures(folder: Path, runs: Iterable[str]) -> Iterator[str]:
    """Yield what each base has won back of what absmax has lost, and how much better it is trained
    than absmax."""

    def losses(run: str, subject: SubjectName, source: str) -> list[tuple[float, int]]:
        path = folder / f"results/runs/{run}/evaluate_run/{subject}.json"
        heldout = read_record(path, Evaluation).heldout
        assert heldout is not None
        documents = (one for one in heldout.per_document if one.source == source)
        return [(one.loss_sum, one.tokens) for one in documents]

    for source in ("licences", "chats"):
        original, absmax, trained = (
            losses("absmax", subject, source) for subject in ("original", "base", "tuned")
        )
        lost = mean(absmax) - mean(original)
        yield f"{source}: original {mean(original):.4f}, absmax {mean(absmax):.4f}"
        for run in runs:
            subject: SubjectName = "base" if "recovery_steps" in RUNS[run] else "start"
            base, tuned = losses(run, subject, source), losses(run, "tuned", source)
            share = (mean(absmax) - mean(base)) / lost
            yield (
                f"{source}, {run}: {mean(base):.4f}, won back {gain(absmax, base)}, {share:.0%}; "
                f"trained {mean(tuned):.4f}, better by {gain(trained, tuned)}"
            )


def mean(losses: list[tuple[float, int]]) -> float:
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)


def gain(first: list[tuple[float, int]], second: list[tuple[float, int]]) -> str:
    """Say how much lower the second loss is, with its 95% interval, paired over documents."""
    gains = [one - other for (one, _), (other, _) in zip(first, second, strict=True)]
    found = estimate_ratio(gains, [count for _, count in first], resamples=4000, seed=0)
    return f"{found.value:.4f} {found.ci95}"


if __name__ == "__main__":
    main()

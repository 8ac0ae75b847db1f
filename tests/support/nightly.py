"""Run all tests as the newest instructions of this processor add numbers up, then those that
compare numbers as every older set would, and once more with other random numbers, which the commit
draws; write what was found to tests/nightly.json.

python -m tests.support.nightly -- OPTIONS OF PYTEST

Exits with 1 if any run has failed. The file says by which commit, when and on which machine."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.support.processors import CPUINFO, flags, supported
from tests.support.suite import ROOT, Summary

SUMMARY = ROOT / "tests" / "nightly.json"
# What compares numbers with stock code, or one way to compute them with another.
NUMERIC = ("tests/model", "tests/kernels", "tests/quantization", "tests/training/test_families.py")


def run_pytest(
    arguments: list[str], variables: dict[str, str], *, python: Path | None = None
) -> Summary:
    """Run pytest with these arguments and variables of the environment. A run that ends without a
    summary has failed. python: of another environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        command = [str(python or sys.executable), "-m", "pytest", f"--summary={path}", *arguments]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return Summary(
        passed=0,
        failed=1,
        skipped=0,
        seconds=round(time.monotonic() - began, 1),
        failures=[f"pytest ended with status {status} and without a summary"],
        files={},
    )


def git(*arguments: str) -> str:
    """Return what git says of this tree."""
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit() -> str:
    """Name the commit of the tests, and say if files differ from it."""
    return git("describe", "--always", "--dirty")


def machine() -> str:
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main(options: list[str]) -> int:
    """Run everything; return the exit status. The file is written after every run."""
    *older, newest = supported(flags(CPUINFO.read_text() if CPUINFO.exists() else "")).items()
    numeric = [folder for folder in NUMERIC if (ROOT / folder).exists()]
    runs = {}
    tested = commit()  # before the summary differs from it
    draw = int(git("rev-parse", "HEAD"), 16) % 10_000
    parts = [("all", newest[1], []), *((f"numeric, {name}", x, numeric) for name, x in older)]
    parts.append((f"numeric, draw {draw}", newest[1], [*numeric, f"--draw={draw}"]))
    for name, processor, files in parts:
        runs[name] = run_pytest([*options, *files], processor.variables)
        summary = {
            "commit": tested,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "torch": version("torch"),
            "instructions": newest[0],
            "runs": runs,
        }
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, run in runs.items():
        print(f"{name}: {run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped")
        print(*(f"  {failure}" for failure in run["failures"]), sep="\n")
    return 1 if any(run["failed"] or not run["passed"] for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))

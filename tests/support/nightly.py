"""Run all tests, then those that compare numbers as each processor that this one can be would add
them up; write what was found to tests/nightly.json.

python -m tests.support.nightly -- OPTIONS OF PYTEST

Exits with 1 if any run has failed. The file says by which commit, when and on which machine.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

from tests.support.processors import CPUINFO, flags, supported

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = ROOT / "tests" / "nightly.json"
# What compares numbers with stock code, or one way to compute them with another.
NUMERIC = ("tests/model", "tests/quantization", "tests/training/test_families.py")
LONGEST = 40  # files whose seconds are listed


class Run(TypedDict):
    """What one run of pytest counted; seconds are wall time, those of files their tests' sum."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    files: dict[str, float]


def counted(report: Path, *, seconds: float) -> Run:
    """Return what a JUnit report of pytest says."""
    outcomes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        outcomes["skipped" if "skipped" in tags else outcome] += 1
        files[_file(case.get("classname", ""))] += float(case.get("time", 0))
    longest = {name: round(total, 1) for name, total in files.most_common(LONGEST)}
    return Run(
        passed=outcomes["passed"],
        failed=outcomes["failed"],
        skipped=outcomes["skipped"],
        seconds=round(seconds, 1),
        files=longest,
    )


def _file(name: str) -> str:
    """Return the file of a test's dotted name, which may end with a class."""
    parts = name.split(".")
    while parts and not parts[-1].startswith("test_"):
        parts.pop()
    return "/".join(parts) + ".py"


def run_pytest(arguments: list[str], variables: dict[str, str]) -> Run:
    """Run pytest with these arguments and variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        began = time.monotonic()
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, check=False
        )
        return counted(report, seconds=time.monotonic() - began)


def machine() -> str:
    """Return the processor, its cores, and the versions that compute."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch " + version(
        "torch"
    )


def main(options: list[str]) -> int:
    """Run everything; return the exit status."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    runs = {"all": run_pytest(options, {})}
    processors = supported(flags(CPUINFO.read_text() if CPUINFO.exists() else ""))
    for name, processor in processors.items():
        runs[f"numeric, {name}"] = run_pytest([*options, *NUMERIC], processor.variables)
    summary = {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "runs": runs,
    }
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, run in runs.items():
        print(f"{name}: {run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped")
    return 1 if any(run["failed"] or not run["passed"] for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))

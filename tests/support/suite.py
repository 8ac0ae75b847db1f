"""Plugin of pytest: what a run counts, how long each file takes, and which files are slow.

Every run writes its summary to `--summary`, by default into pytest's cache. `--draw N` adds N to
every seed that a test gives to torch: a bound has to hold for any. `tests/slow.txt` lists
the files that take longest, longest first; `make test` leaves those marked `slow` to
`make nightly`, after which `python -m tests.support.suite` chooses them anew."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import TypedDict

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "slow.txt"
LISTED_S = 5.0  # files that take less are not worth an order
OTHERS = "(others)"
SHARE = 0.22  # of the time of everything, for `make test`; imports make it 30%
# Three processes on two cores for 7.5 minutes (imports take two more), and 240 s of tests in files
# of `ALWAYS` that are slow themselves.
MOST_S = 1590.0
# One run of the whole workflow, its graph, the training's loop, one family of each kind, and the
# figures of the house: of every change, however long they take.
ALWAYS = (
    "tests/workflow/test_run.py",
    "tests/workflow/test_dag.py",
    "tests/training/test_families.py",
    "tests/training/test_loop.py",
    "tests/project/test_house.py",
)


class Summary(TypedDict):
    """Of one run of pytest. Seconds are wall time, those of files the sum over their tests; files
    of less than `LISTED_S` are one sum."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]
    files: dict[str, float]


def pytest_addoption(parser: pytest.Parser) -> None:
    default = ROOT / ".pytest_cache" / "summary.json"
    said = "file for the counts and durations of this run"
    parser.addoption("--summary", type=Path, default=default, help=said)
    parser.addoption("--draw", type=int, default=0, help="is added to every seed of torch")


def pytest_configure(config: pytest.Config) -> None:
    if draw := config.getoption("--draw"):
        draw_otherwise(draw)
    if not hasattr(config, "workerinput"):  # what pytest-xdist's workers report comes here too
        config.pluginmanager.register(Recorder(config))


def draw_otherwise(draw: int) -> None:
    """Add a number to every seed that this process gives to torch from now on."""
    import torch

    seeded = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        return seeded(seed + draw)

    class Generator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + draw)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    torch.Generator = Generator


class Recorder:
    """Counts what is reported, and writes the summary at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = config.getoption("--summary")
        self.began = time.monotonic()
        self.outcomes = Counter()
        self.failures = []
        self.files = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self.failures.append(report.nodeid)
        elif report.skipped or report.when == "call":
            self.outcomes[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        failures = sorted(set(self.failures))
        files = {name: round(s, 1) for name, s in self.files.most_common() if s >= LISTED_S}
        others = sum(seconds for seconds in self.files.values() if seconds < LISTED_S)
        summary = Summary(
            passed=self.outcomes["passed"],
            failed=len(failures),
            skipped=self.outcomes["skipped"],
            seconds=round(time.monotonic() - self.began, 1),
            failures=failures,
            files=files | {OTHERS: round(others, 1)},
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow files, and begin with those that take longest: a long one begun last would run
    alone at the end. All others keep their order."""
    table = read_table(TABLE.read_text(encoding="utf-8"))
    places = {name: place for place, name in enumerate(table)}
    for item in items:
        if table.get(_file(item)) == "slow":
            item.add_marker("slow")
    items.sort(key=lambda item: places.get(_file(item), len(places)))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def read_table(text: str) -> dict[str, str]:
    """Return `slow` or `always` by file, in the order of the lines `SECONDS WORD FILE`."""
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name: word for _, word, name in rows}


def table_of(files: dict[str, float]) -> str:
    """Return the table for the seconds of all files: the longest are slow, until what is left takes
    at most `SHARE` of all, and no more than `MOST_S`."""
    left = sum(files.values())
    most = min(SHARE * left, MOST_S)
    lines = ["# seconds, when, file: written by `python -m tests.support.suite`"]
    for name, seconds in sorted(files.items(), key=lambda pair: -pair[1]):
        if name != OTHERS:
            slow = left > most and name not in ALWAYS
            left -= seconds if slow else 0
            lines.append(f"{seconds:.1f} {'slow' if slow else 'always'} {name}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    nightly = json.loads((ROOT / "tests" / "nightly.json").read_text(encoding="utf-8"))
    TABLE.write_text(table_of(nightly["runs"]["all"]["files"]), encoding="utf-8")

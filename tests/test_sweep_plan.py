"""A sweep of a thousand runs is planned within a minute of processor time."""

import re
import resource
from pathlib import Path

from tests.workflow_project import make_project

RUNS = 1000
SECONDS = 60.0


def test_sweep_of_a_thousand_runs_is_planned_within_a_minute(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    runs = {f"r{n}": {"train": {"learning_rate": 1e-6 * (n + 1)}} for n in range(RUNS)}
    project.write_settings(project.settings | {"runs": runs})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = project.run("--dry-run", "all", "--quiet", "rules")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert re.search(rf"^finetune +{RUNS}$", done.output, re.MULTILINE), done.output[-2000:]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < SECONDS, "of the processor, whatever else the machine does"

"""The work of planning a sweep grows with its runs, not with their square."""

import os
import re
import subprocess
import sys

from tests.support.workflow_project import REPOSITORY, make_project

SIZES = (5, 25, 45)  # equal steps: what every plan takes falls out of the differences

# Counts functions of Python that are called, as a time says more of what else the machine does.
COUNTED = """
from cProfile import Profile
from snakemake.cli import main
profile = Profile(builtins=False)
profile.enable()
try:
    main()
finally:
    profile.disable()
    print("calls:", sum(function.callcount for function in profile.getstats()))
"""


def calls_to_plan(root, *, num_runs):
    project = make_project(root)
    runs = {f"r{n}": {"train": {"learning_rate": 1e-6 * (n + 1)}} for n in range(num_runs)}
    project.write_settings(project.settings | {"runs": runs})
    options = project.command("--dry-run", "all", "--quiet", "rules")[3:]
    environment = project.variables() | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", COUNTED, *options]
    done = subprocess.run(
        command, cwd=root, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    output = done.stdout + done.stderr
    assert re.search(rf"^finetune +{num_runs}$", output, re.MULTILINE), output[-2000:]
    (calls,) = re.findall(r"^calls: (\d+)$", output, re.MULTILINE)
    return int(calls)


def test_work_of_planning_a_sweep_grows_no_faster_than_its_runs(tmp_path):
    few, some, many = (calls_to_plan(tmp_path / str(n), num_runs=n) for n in SIZES)
    assert many - some < 1.1 * (some - few)

"""The workflow as a module of another Snakefile, whose folder has none of its packages."""

import os
import subprocess
import sys

from tests.support.workflow_project import REPOSITORY, make_project

OUTER = """
configfile: "config.yaml"


module tuning:
    snakefile:
        "{snakefile}"
    config:
        config


use rule * from tuning as tuning_*
"""


def test_job_of_an_imported_workflow_runs_where_only_the_outer_snakefile_lies(tmp_path):
    project = make_project(tmp_path)
    outer = OUTER.format(snakefile=REPOSITORY / "Snakefile")
    (project.root / "Snakefile").write_text(outer)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--until"]
    done = subprocess.run(
        [*command, "tuning_describe_model", "--", "tuning_tokenize"],
        cwd=project.root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(project.root.glob("results/models/tiny-*/description.json"))) == 1

"""What users of Snakemake expect of a workflow: its usual commands, from any folder, by either
Snakefile; and the folder that the workflow catalog runs."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.preloaded_python import SETTLED
from tests.support.workflow_project import REPOSITORY, Project, executed, parse_jobs

SNAKEFILES = ("Snakefile", "workflow/Snakefile")


def snakemake(folder, *arguments, snakefile="Snakefile"):
    """Return what Snakemake prints, started in an empty folder beside `folder`."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / snakefile)),
            *("--directory", str(folder), "--nocolor", *arguments),
        ],
        cwd=elsewhere,
        env=os.environ | SETTLED,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [*elsewhere.iterdir()] == []
    return done.stdout + done.stderr


@pytest.fixture
def project(finished_project, tmp_path):
    return finished_project.copy(tmp_path / "project")


@pytest.mark.parametrize("snakefile", SNAKEFILES)
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("--rulegraph", r"digraph snakemake_dag"),
        ("--summary", r"results/report/report\.html\t.*\trender_report\t"),
        ("--list-rules", r"finetune"),
        ("--dry-run", r"Nothing to be done"),
    ],
)
def test_usual_command_needs_neither_target_nor_cores(project, snakefile, command, line):
    assert re.search(line, snakemake(project.root, command, snakefile=snakefile))


def test_report_of_snakemake_holds_page_table_and_card(project, tmp_path):
    snakemake(project.root, "--report", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    for text in ("All runs", "Model cards", "report.html", "comparison.csv", "README.md"):
        assert text in page
    assert "The model card of the run demo." in page


def test_settings_of_another_folder_train_where_the_command_says(tmp_path):
    """The demo's, whose paths are files of the workflow."""
    folder = tmp_path / "project"
    folder.mkdir()
    config = ("--configfile", str(REPOSITORY / "config.yaml"))
    planned = {job.rule for job in parse_jobs(snakemake(folder, "--dry-run", *config))}
    assert {"tokenize_dataset", "finetune", "render_report"} <= planned


def test_folder_of_the_workflow_catalog_runs_to_its_end(tmp_path):
    shutil.copytree(REPOSITORY / ".test", tmp_path / "test")
    done = Project(tmp_path / "test").run()
    assert executed(done.output)["finetune"] == 1
    assert (tmp_path / "test" / "results" / "report" / "report.html").is_file()


def test_page_on_clusters_names_what_the_profile_for_slurm_needs():
    text = (REPOSITORY / "workflow/docs/clusters.md").read_text("utf-8")
    profile = (REPOSITORY / "workflow/profiles/slurm/config.yaml").read_text("utf-8")
    (executor,) = re.findall(r"^executor: (\w+)$", profile, re.M)
    package = f"snakemake-executor-plugin-{executor}"
    assert package in text
    assert package in (REPOSITORY / "envs" / "cluster.txt").read_text("utf-8").splitlines()

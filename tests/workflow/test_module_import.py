"""The workflow as a module of another Snakefile, whose folder has none of its packages."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.workflow_project import (
    REPOSITORY,
    SETTINGS,
    Project,
    copy_of_repository,
    make_project,
)
from workflow.lib.settings.overrides import merge

OUTER = """
configfile: "config.yaml"


module tuning:
    snakefile:
        {snakefile}
    prefix:
        "{prefix}"
    config:
        config


use rule * from tuning as tuning_*
"""
IN_A_CHECKOUT = f'"{REPOSITORY / "Snakefile"}"'

# What users name beside the model and the data, and what is downloaded or made by another run.
WIDE = {
    "data": {"chat_template": "data/template.jinja"},
    "quantize": {"method": "calibrated", "calibration_text": "data/text.txt"},
    "evaluate": {"tasks_dir": "data/tasks"},
    "export": {"merged": True, "gguf": ["f16"], "steps": [2]},
    "runs": {
        "demo": {},
        "of_hub": {"model": {"name": "far", "source": "owner/far"}},
        "pairs": {
            "data": {"chat_template": None, "train": "data/pairs.jsonl"},
            "train": {"start_from": "demo", "objective": "dpo"},
            "preferences": {"reference": "demo"},
            "export": {"gguf": []},
        },
    },
}


def imported(root, *, prefix="", snakefile=IN_A_CHECKOUT):
    """Return the project of a Snakefile that imports this one, in a folder of its own."""
    outer = root / "outer"
    outer.mkdir()
    (outer / "Snakefile").write_text(OUTER.format(snakefile=snakefile, prefix=prefix))
    (outer / "workflow").symlink_to(REPOSITORY / "workflow")
    project = make_project(root / "project")
    return Project(project.root, outer)


def plainly(project, *arguments, **environment):
    """Run Snakemake as a user does who has no checkout."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", *arguments],
        cwd=project.root,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_job_of_an_imported_workflow_runs_where_only_the_outer_snakefile_lies(tmp_path):
    project = imported(tmp_path)
    shutil.copy2(project.repository / "Snakefile", project.root)
    done = plainly(project, "--until", "tuning_describe_model", "--", "tuning_tokenize")
    assert done.returncode == 0, done.stdout
    assert len(list(project.root.glob("results/models/tiny-*/description.json"))) == 1


def test_run_with_a_prefix_makes_nothing_outside_of_it(tmp_path):
    project = imported(tmp_path, prefix="tuned/here")
    before = {path.name for path in project.root.iterdir()}
    project.run("tuning_train")
    assert {path.name for path in project.root.iterdir()} == before | {"tuned", ".snakemake"}
    made = project.root / "tuned" / "here"
    assert {path.name for path in made.iterdir()} == {"results", "logs"}
    assert list(made.glob("results/checkpoints/demo-*/plan.json"))
    assert list(made.glob("results/tensorboard/demo/*"))
    assert project.snakemake("tuning_train").nothing_to_do


def test_every_path_of_a_plan_with_a_prefix_is_in_it_or_the_users_own(tmp_path):
    project = imported(tmp_path, prefix="tuned")
    project.write_settings(merge(SETTINGS, WIDE))
    for name in ("template.jinja", "text.txt"):
        (project.root / "data" / name).write_text("{{ messages[0].content }}")
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (project.root / "data" / "pairs.jsonl").write_text(pair * 60)
    shutil.copytree(REPOSITORY / "workflow" / "resources" / "tasks", project.root / "data/tasks")
    shown = project.run("--dry-run", "--printshellcmds", "tuning_all").output
    paths = re.findall(r"(?<![\w./-])[\w./-]*\b(?:results|logs|model|data)/[\w./-]+", shown)
    inside = {path for path in paths if path.startswith("tuned/")}
    outside = {path for path in paths if not path.startswith(("tuned/", "/"))}
    assert {path.split("/")[1] for path in inside} == {"results", "logs"}
    assert {path.split("/")[0] for path in outside} == {"model", "data"}
    named = {"template.jinja", "text.txt", "pairs.jsonl", "tasks/pydocs_mc.yaml", "train.jsonl"}
    assert {f"data/{name}" for name in named} <= outside


@pytest.mark.parametrize("prefix", ["a b", "-tuned", "tuned/{run}", "$(id)", "a:b", "a,b"])
def test_prefix_that_rules_or_commands_would_misread_is_refused(tmp_path, prefix):
    done = imported(tmp_path, prefix=prefix).snakemake("--dry-run", "tuning_train")
    assert done.status != 0
    assert f"prefix of the module = '{prefix}/': it holds other characters" in done.output
    assert "Traceback" not in done.output


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Environment in which github.com is a folder that has the tag v1 of owner/tuner."""
    root = tmp_path_factory.mktemp("host")
    repository = copy_of_repository(root / "owner" / "tuner")
    shutil.copy2(REPOSITORY / "config.yaml", repository)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    config = root / "gitconfig"
    config.write_text(f'[url "file://{root}/"]\n\tinsteadOf = https://github.com/\n')
    return {"GIT_CONFIG_GLOBAL": str(config), "XDG_CACHE_HOME": str(root / "cache")}


def deployed(root):
    """Return a project as `snakedeploy` writes it: the Snakefile, and copies of two folders."""
    project = imported(root, snakefile='github("owner/tuner", path="Snakefile", tag="v1")')
    shutil.rmtree(project.root)
    (project.root / "workflow").mkdir(parents=True)
    outer = (project.repository / "Snakefile").read_text()
    snakefile = outer.replace('"config.yaml"', '"config/config.yaml"')
    (project.root / "workflow" / "Snakefile").write_text(snakefile)
    for folder in ("config", "profiles"):
        shutil.copytree(REPOSITORY / folder, project.root / folder)
    return project


def test_snakefile_of_a_git_host_without_the_library_says_how_to_install_it(tmp_path, host):
    done = plainly(deployed(tmp_path), "--dry-run", "tuning_train", **host)
    assert done.returncode != 0
    assert "pip install 'fsdp-qlora-workflow @ git+https://" in done.stdout
    assert "Traceback" not in done.stdout


def test_deployed_workflow_and_an_installed_library_plan_the_demo(tmp_path, host):
    project = deployed(tmp_path)
    done = plainly(project, "--dry-run", "tuning_train", PYTHONPATH=str(REPOSITORY), **host)
    assert done.returncode == 0, done.stdout
    assert str(REPOSITORY / "workflow" / "resources" / "base") in done.stdout


def test_users_file_goes_before_one_of_the_workflow_with_its_name(tmp_path, host):
    project = deployed(tmp_path)
    shutil.copytree(
        REPOSITORY / "workflow/resources/base", project.root / "workflow/resources/base"
    )
    done = plainly(project, "--dry-run", "tuning_train", PYTHONPATH=str(REPOSITORY), **host)
    assert str(REPOSITORY / "workflow" / "resources" / "base") not in done.stdout
    assert str(REPOSITORY / "workflow" / "resources" / "pydocs") in done.stdout

"""`snakemake verify`: what the command says, and that it makes nothing."""

import subprocess
import sys
from pathlib import Path

from tests.support.certificates import add_items, certify
from tests.support.hub_server import HubRepo, start_hub
from tests.support.report_examples import write_run
from tests.support.workflow_project import make_project
from workflow.lib.system.files import read_json, write_json


def test_certificate_is_verified_by_a_command_that_runs_no_stage(tmp_path):
    project = make_project(tmp_path / "project")
    add_items(write_run(project.root, "demo", num_steps=3))
    named = f"certificate={certify(project.root, 'demo')}"
    done = project.snakemake("verify", "--config", named)
    assert done.status == 0, done.output
    assert "6 of 6 files are those that were certified" in done.output
    said = read_json(project.root / named.partition("=")[2])
    said["predicate"]["measured"]["tuned"]["heldout"]["loss"] = 1.0
    write_json(project.root / named.partition("=")[2], said)
    refused = project.snakemake("verify", "--config", named)
    assert refused.status == 1
    assert "tuned.heldout.loss = 1.0, found 1.88" in refused.output
    assert not (project.root / "results").exists()


def test_published_repository_is_downloaded_and_verified(tmp_path, monkeypatch):
    run = write_run(tmp_path, "demo", num_steps=3)
    add_items(run)
    certify(tmp_path, "demo")
    names = ("certify_run/certificate.json", "evaluate_run/items.json")
    files = {Path(name).name: (run / name).read_bytes() for name in names}
    with start_hub({"acme/demo": HubRepo(files)}) as endpoint:
        variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
        variables |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found, lost = (
            subprocess.run(
                [sys.executable, "-m", "workflow.scripts.verify", "--certificate", repo],
                capture_output=True,
                text=True,
                check=False,
            )
            for repo in ("acme/demo", "acme/other")
        )
    assert found.returncode == 0, found.stderr
    assert "1 of 6 files are those that were certified" in found.stderr
    assert lost.returncode == 1
    assert "certificate = 'acme/other'" in lost.stderr

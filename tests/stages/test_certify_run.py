"""The stage that certifies a run: it names what was made, and nothing that is damaged."""

import argparse
import json
from contextlib import chdir
from pathlib import Path

import pytest

from tests.support.certificates import add_items
from tests.support.report_examples import write_run
from tests.support.workflow_project import make_project
from workflow.lib.artifacts import layout
from workflow.lib.evaluation.certificate import verify
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checksums
from workflow.scripts.certify_run import main


@pytest.fixture
def root(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    for name in ("base", "runs/demo/consolidate/adapter"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        write_checksums(tmp_path / name)
    add_items(folder)
    return tmp_path


def certify(root):
    run = Path("runs/demo")
    adapter = run / "consolidate" / "adapter"
    with chdir(root):
        main(
            argparse.Namespace(
                config=json.loads(layout.stage_json("certify_run", RunConfig())),
                model=Path("base"),
                data=[Path("base")],
                require={},
                run="demo",
                folders=[Path("base"), adapter],
                files=[run / "finetune" / "summary.json", run / "consolidate" / "parity.json"],
                evaluation=run / "evaluate_run",
                published=adapter,
                output=Path("certificate.json"),
            )
        )
        return verify(Path("certificate.json"), signed_by=None)


def test_certificate_names_folders_files_and_items_and_holds(root):
    found = certify(root)
    assert found.absent == []
    assert {file.name for file in found.said.subject} == {
        "base/model.safetensors",
        "runs/demo/consolidate/adapter/adapter_config.json",
        "runs/demo/consolidate/adapter/model.safetensors",
        "runs/demo/consolidate/parity.json",
        "runs/demo/evaluate_run/items.json",
        "runs/demo/finetune/summary.json",
    }


def test_damaged_file_is_not_certified(root):
    (root / "base" / "model.safetensors").write_bytes(b"rotten!")
    with pytest.raises(UserError, match=r"base/model\.safetensors is damaged"):
        certify(root)
    assert not (root / "certificate.json").exists()


def test_certificate_is_planned_where_it_is_asked_for(tmp_path):
    project = make_project(tmp_path / "project")
    assert "certify_run" not in project.planned("all")
    assert project.planned("certify")["certify_run"] == 1

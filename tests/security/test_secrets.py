"""Tokens and keys of the environment are in nothing that a run leaves, shows or starts."""

import logging
import stat

import pytest

from tests.support.canaries import CANARIES
from tests.support.forked_stage import command_line
from workflow.scripts.command import run, stage_parser


def files(folder):
    yield from (path for path in folder.rglob("*") if path.is_file())


def test_whole_workflow_leaves_no_secret_in_any_file_or_on_the_terminal(finished_project):
    places = list(files(finished_project.root.parent))
    names = {path.relative_to(finished_project.root.parent).parts[0] for path in places}
    assert {"terminal.txt", "finished"} <= names
    found = {
        str(path): name
        for path in places
        for name, secret in CANARIES.items()
        if secret.encode() in path.read_bytes()
    }
    assert found == {}


def test_whole_workflow_leaves_nothing_that_others_may_write(finished_project):
    root = finished_project.root
    places = [path for part in ("results", "logs") for path in (root / part).rglob("*")]
    assert len(places) > 50
    assert [path for path in places if path.lstat().st_mode & stat.S_IWOTH] == []


def test_traceback_of_a_defect_masks_the_secrets_it_quotes(tmp_path, monkeypatch, capsys):
    secret = CANARIES["HF_TOKEN"]
    monkeypatch.setenv("HF_TOKEN", secret)
    log = tmp_path / "stage.log"
    monkeypatch.setattr("sys.argv", ["stage", *command_line({"config": {}, "log": log})])

    def main(args):
        raise RuntimeError(f"request with {secret} to https://me:{secret}@hub.example failed")

    try:
        with pytest.raises(SystemExit):
            run(main, stage_parser(None))
    finally:
        logging.getLogger("workflow").handlers.clear()
    shown = capsys.readouterr().err + log.read_text()
    assert shown.count("request with *** to https://***@hub.example failed") >= 2
    assert secret not in shown

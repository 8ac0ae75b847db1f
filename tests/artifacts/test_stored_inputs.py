"""What settings may name where artifacts lie in an object store."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from workflow.lib.artifacts.stored_inputs import check_stored_paths, travelling_files
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError

HUB: dict[str, Any] = {"model": {"source": "owner/name"}, "evaluate": {"tasks_dir": None}}


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Check a run's paths in an empty folder, as the Snakemake that sends the jobs."""
    monkeypatch.chdir(tmp_path)
    run = RunConfig.model_validate(HUB | {"data": {"train": "data/train.jsonl"}} | settings)
    check_stored_paths("demo", run, sent_from_here=True)


@pytest.mark.parametrize("path", ["data/train.jsonl", "data", "./data"])
def test_path_below_the_prefix_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    check(tmp_path, monkeypatch, data={"train": path})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/data/train.jsonl", "below its prefix"),
        ("../train.jsonl", "below its prefix"),
        ("data/*.jsonl", "not searched for patterns"),
    ],
)
def test_path_that_no_store_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as error:
        check(tmp_path, monkeypatch, data={"train": path})
    assert path in str(error.value)


def test_folder_here_that_jobs_would_take_for_a_hub_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match=r"Write \./models/mine"):
        check(tmp_path, monkeypatch, model={"source": "models/mine"})


def test_task_files_must_be_tracked_because_they_travel_with_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    with pytest.raises(UserError, match="git add"):
        check(tmp_path, monkeypatch, evaluate={"tasks_dir": "tasks"})
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    check(tmp_path, monkeypatch, evaluate={"tasks_dir": "tasks"})


def test_hash_of_what_travels_changes_with_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunConfig.model_validate(HUB | {"data": {"chat_template": "chat.jinja"}})
    hashes = set()
    for text in ("one", "two"):
        (tmp_path / "chat.jinja").write_text(text)
        hashes.add(travelling_files(run, tasks=False))
    assert len(hashes) == 2

"""Publishing: what was exported is on the hub, once and private, or nothing is and one message says
why."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from tests.support.forked_stage import command_line
from tests.support.hub_server import WRITE_TOKEN, HubRepo, start_hub
from tests.support.report_examples import edit, write_run
from tests.support.workflow_project import make_project
from workflow.lib.system.files import read_checked_json, read_json, write_checksums, write_json

ROOT = Path(__file__).parents[2]
CARD = (
    "---\nbase_model: acme/tiny\nbase_model_relation: adapter\nlibrary_name: peft\n---\n\n# demo\n"
)


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    adapter = folder / "consolidate" / "adapter"
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": "acme/tiny", "r": 16})
    save_file({"weight": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    write_checksums(adapter)
    (adapter / "README.md").write_text(CARD)
    return folder


def uploaded(run):
    """Return the content of what should be there, by name."""
    adapter = run / "consolidate" / "adapter"
    return {path.name: path.read_bytes() for path in adapter.iterdir()}


def publish(run, endpoint, *, token=WRITE_TOKEN, **export):
    root = run.parents[1]
    adapter = run / "consolidate" / "adapter"
    options = {
        "config": {"export": {"hub_repo": "acme/demo", **export}},
        "run": "demo",
        "folder": adapter,
        "card": adapter / "README.md",
        "summary": run / "finetune" / "summary.json",
        "parity": run / "consolidate" / "parity.json",
        "output": run / "publish_run" / "published.json",
    }
    command = [sys.executable, "-m", "workflow.scripts.publish_run", *command_line(options)]
    variables = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    variables["HF_HUB_DISABLE_XET"] = "1"  # the stand-in takes large files by git LFS
    variables |= {"HF_HOME": str(root / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=root, env=os.environ | variables, capture_output=True, text=True, check=False
    )


def files_of(repo):
    return dict(repo.commits[repo.branches["main"]])


@pytest.mark.parametrize("public", [False, True])
def test_adapter_and_card_are_in_a_repository_that_is_private_unless_asked(run, public):
    repos: dict[str, HubRepo] = {}
    with start_hub(repos) as endpoint:
        done = publish(run, endpoint, hub_public=public)
    assert done.returncode == 0, done.stderr
    assert files_of(repos["acme/demo"]) == uploaded(run)
    assert repos["acme/demo"].private is not public
    published = read_checked_json(run / "publish_run" / "published.json")
    assert published["commit_url"].endswith(repos["acme/demo"].branches["main"])


def test_repeated_upload_goes_to_the_same_repository(run):
    repos: dict[str, HubRepo] = {}
    with start_hub(repos) as endpoint:
        publish(run, endpoint)
        (run / "consolidate" / "adapter" / "README.md").write_text(f"{CARD}Better.\n")
        done = publish(run, endpoint)
    assert done.returncode == 0, done.stderr
    assert files_of(repos["acme/demo"])["README.md"].endswith(b"Better.\n")


def test_upload_that_broke_off_goes_on_with_the_files_that_are_missing(run):
    adapter = run / "consolidate" / "adapter"
    first, second = adapter / "adapter_model.safetensors", adapter / "more.safetensors"
    save_file({"weight": torch.ones(2)}, second)
    write_checksums(adapter)
    (adapter / "README.md").write_text(CARD)
    oids = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)}
    repo = HubRepo({})
    repo.refused = {oids[second]}
    with start_hub({"acme/demo": repo}) as endpoint:
        broken = publish(run, endpoint)
        assert broken.returncode == 1
        assert "the upload broke off (" in broken.stderr
        assert "Repeat the command" in broken.stderr
        assert "Traceback" not in broken.stderr
        assert files_of(repo) == {}, "nothing is visible of an upload that is not whole"
        assert repo.sent == [oids[first]]
        repo.refused = set()
        done = publish(run, endpoint)
    assert done.returncode == 0, done.stderr
    assert repo.sent == [oids[first], oids[second]], "each is sent once"
    assert files_of(repo) == uploaded(run)


def test_card_of_a_merged_model_says_that_it_is_one(run):
    repos: dict[str, HubRepo] = {}
    with start_hub(repos) as endpoint:
        done = publish(run, endpoint, merged=True, hub_form="merged")
    assert done.returncode == 0, done.stderr
    card = ModelCard(files_of(repos["acme/demo"])["README.md"].decode())
    assert (card.data.base_model_relation, card.data.library_name) == ("finetune", "transformers")
    assert "This repository holds the merged model" in card.text
    assert "# demo" in card.text


def name_folder_in_card(run):
    (run / "consolidate" / "adapter" / "README.md").write_text(f"base: {Path.home()}/models/x\n")


def name_folder_in_adapter(run):
    adapter = run / "consolidate" / "adapter"
    config = read_json(adapter / "adapter_config.json")
    write_json(adapter / "adapter_config.json", config | {"base_model_name_or_path": str(run)})
    write_checksums(adapter)


def name_folder_of_base_in_card(run):
    card = run / "consolidate" / "adapter" / "README.md"
    card.write_text(f"{CARD}```python\nbase = load('path/to/nf4/base')\n```\n")


def fail_training_check(run):
    edit(run / "finetune" / "summary.json", lambda d: d["checks"][0].update(passed=False))


def fail_parity(run):
    edit(run / "consolidate" / "parity.json", lambda d: d.update(passed=False))


def damage_weights(run):
    (run / "consolidate" / "adapter" / "adapter_model.safetensors").write_bytes(b"rotten!")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (name_folder_in_card, "README.md holds"),
        (name_folder_in_adapter, "adapter_config.json holds"),
        (name_folder_of_base_in_card, "4-bit weights that only this machine has"),
        (fail_training_check, "a check failed (Gathered weights equal"),
        (fail_parity, "a check failed (the exported adapter gives"),
        (damage_weights, "adapter_model.safetensors is damaged"),
    ],
)
def test_what_must_not_be_published_is_refused_before_the_hub_is_asked(run, spoil, message):
    spoil(run)
    repos: dict[str, HubRepo] = {}
    with start_hub(repos) as endpoint:
        done = publish(run, endpoint)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert repos == {}
    assert not (run / "publish_run" / "published.json").exists()


def test_token_that_may_not_write_is_one_message(run):
    with start_hub({}) as endpoint:
        done = publish(run, endpoint, token="hf_other")
    assert done.returncode == 1
    assert "export.hub_repo = 'acme/demo': the hub refuses" in done.stderr
    assert "Traceback" not in done.stderr


def test_publishing_is_planned_only_where_it_is_asked_for(tmp_path):
    project = make_project(tmp_path / "project")
    project.edit({"export": {"hub_repo": "acme/demo"}})
    assert "publish_run" not in project.planned("all")
    assert project.planned("publish")["publish_run"] == 1

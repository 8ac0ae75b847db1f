"""The command `download_source` against a stand-in for the hub."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tests.checkpoints.files.test_adapter_config import OLD
from tests.support.forked_stage import settings_file
from tests.support.hub_server import HubRepo, start_hub
from tests.support.preflight_examples import TINY
from tests.support.shared import reserved_ports
from workflow.lib.data.reading.hub_download import Source, explain
from workflow.lib.system.files import read_checked_json

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_QZJXVKWYPLMNBTRDFGHC"
SHARDS = {
    "model-00001-of-00002.safetensors": bytes(range(251)) * 41,
    "model-00002-of-00002.safetensors": b"second" * 997,
}
INDEX = {
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
}
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": "{{ 'é' }}".encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **SHARDS,
}
JUNK = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_custom.py": b"import os",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
    "onnx/config.json": b"{}",
    "README.md": b"# card",
}
SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights" * 101}


def download(endpoint, output, *, environment=None, options=(), **config):
    """Run the command as a rule does; `output.parent` also holds its log and the hub's cache."""
    request = {"repo_id": "owner/name", "revision": None, "kind": "model", "files": None} | config
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    arguments = ["--config", str(settings_file(request)), "--output", str(output)]
    arguments += ["--log", str(output.parent / "log.txt"), *options]
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(output.parent / "hf_home"), "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, "-m", "workflow.scripts.download_source", *arguments],
        cwd=ROOT,
        env=inherited | hub | (environment or {}),
        capture_output=True,
        text=True,
    )


def refusal(endpoint, output, **options):
    """Run the command, which must fail with a message and without a traceback; return the
    message."""
    result = download(endpoint, output, **options)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert not output.exists()
    return result.stderr.splitlines()[-1]


def contents(folder):
    """Return every file below `folder`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def manifest(folder):
    value: dict[str, Any] = read_checked_json(folder / "source.json")
    return value


def test_model_folder_has_exactly_the_safetensors_model_and_its_manifest(tmp_path):
    """No code and no pickle is even requested; the token goes to the hub and nowhere else."""
    repo = HubRepo(MODEL | JUNK)
    repo.licence = "apache-2.0"
    with start_hub({"owner/name": repo}) as endpoint:
        result = download(endpoint, tmp_path / "out", environment={"HF_TOKEN": TOKEN})
    assert result.returncode == 0, result.stderr
    assert manifest(tmp_path / "out") == {
        "repo_id": "owner/name",
        "kind": "model",
        "requested_revision": None,
        "commit": repo.branches["main"],
        "licence": "apache-2.0",
        "files": [
            {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, content in sorted(MODEL.items())
        ],
    }
    downloaded = contents(tmp_path / "out")
    downloaded.pop("source.json")
    assert downloaded == MODEL
    requested = [path for _, path, _ in repo.requests]
    assert not [path for path in requested if path.endswith((".py", ".bin", ".pt"))]
    assert all(headers.get("authorization") == f"Bearer {TOKEN}" for _, _, headers in repo.requests)
    written = b"".join(contents(tmp_path).values()) + (result.stdout + result.stderr).encode()
    assert b"is commit" in written  # the log is among them
    assert TOKEN.encode() not in written


def test_adapter_is_its_two_files_and_its_settings_are_those_of_the_runs(tmp_path):
    files = {
        "adapter_config.json": json.dumps(OLD).encode(),
        "adapter_model.safetensors": b"values" * 99,
    }
    lora = {"r": 64, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"]}
    runs = {"same": {"lora": lora}, "other": {"lora": lora | {"r": 8}}}
    with start_hub({"owner/name": HubRepo(files | JUNK | MODEL)}) as endpoint:
        options = ["--checks", str(settings_file({"trains_here": True, "runs": runs}))]
        said = download(endpoint, tmp_path / "out", kind="adapter", options=options)
        assert "run other: train.start_from = 'owner/name'" in said.stderr
        assert "lora.r = 8: set it to 64" in said.stderr
        assert not (tmp_path / "out").exists()
        options = [
            "--checks",
            str(settings_file({"trains_here": True, "runs": {"same": runs["same"]}})),
        ]
        done = download(endpoint, tmp_path / "out", kind="adapter", options=options)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out").keys() == {*files, "source.json"}
    assert len(manifest(tmp_path / "out")["commit"]) == 40


def test_commit_whose_branch_moved_is_there_and_a_single_file_comes_before_shards(tmp_path):
    repo = HubRepo(MODEL | SMALL)
    old = repo.branches["main"]
    repo.commit(SMALL | {"config.json": b'{"new": 1}'})
    with start_hub({"owner/name": repo}) as endpoint:
        download(endpoint, tmp_path / "out", revision=old)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    weights = [name for name in contents(tmp_path / "out") if "safetensors" in name]
    assert weights == ["model.safetensors"]


def test_branch_is_asked_once_and_everything_else_by_its_commit(tmp_path):
    repo = HubRepo(SMALL)
    commit = repo.commit(SMALL | {"config.json": b'{"b": 1}'}, branch="feature/x")
    with start_hub({"owner/name": repo}) as endpoint:
        download(endpoint, tmp_path / "out", revision="feature/x")
    assert manifest(tmp_path / "out")["commit"] == commit
    after = [path for _, path, _ in repo.requests[1:]]
    assert after
    assert all(f"/{commit}" in path for path in after)


def test_dataset_download_takes_named_files_folders_and_globs(tmp_path):
    names = (
        "train.jsonl",
        "data/a.parquet",
        "data/b.parquet",
        "data/deep/c.parquet",
        "load.py",
        "more/x/d.csv",
    )
    repo = HubRepo({name: name.encode() for name in names}, kind="dataset", lfs=(".parquet",))
    with start_hub({"owner/name": repo}) as endpoint:
        download(
            endpoint,
            tmp_path / "out",
            kind="dataset",
            files=["train.jsonl", "data/*.parquet", "more"],
        )
    assert sorted(contents(tmp_path / "out")) == [
        "data/a.parquet",
        "data/b.parquet",
        "more/x/d.csv",
        "source.json",
        "train.jsonl",
    ]


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        (
            {"gated": True},
            {},
            "model.source = 'owner/name': the hub gives it only to those who accepted its licence. "
            "Accept the licence on {endpoint}/owner/name and set HF_TOKEN to a token of that "
            "account.",
        ),
        (
            {"bad_token": True},
            {"environment": {"HF_TOKEN": TOKEN}},
            "...the hub refused (HfHubHTTPError: Client error '401 Unauthorized'..."
            "If that names access or a token, check HF_TOKEN...",
        ),
        (
            {},
            {"revision": "v2"},
            "model.source = 'owner/name': it has no branch, tag or commit 'v2'. Correct "
            "model.revision, or set it to null for the main branch.",
        ),
        (
            {"listed_size": {"model.safetensors": 2**60}},
            {},
            "...1073741824.0 GiB are to be downloaded...",
        ),
    ],
    ids=["gated", "token", "revision", "larger than the disk"],
)
def test_refusal_says_what_to_change_before_anything_is_downloaded(tmp_path, state, options, words):
    repo = HubRepo(SMALL)
    vars(repo).update(state)
    with start_hub({"owner/name": repo}) as endpoint:
        message = refusal(endpoint, tmp_path / "out", **options)
    expected = re.escape(words.format(endpoint=endpoint)).replace(re.escape("..."), ".*")
    assert re.fullmatch(expected, message)
    assert TOKEN not in message
    assert repo.gated or repo.downloads() == []  # a gated file is asked for, and refused


@pytest.mark.parametrize(
    ("kind", "repo_id", "change"),
    [
        ("model", "owner/typo", "set model.source to a folder that exists"),
        ("model", "data/my folder", "set model.source to a folder that exists"),
        ("dataset", "owner/name", "data.source to null"),  # a model of that name is none
    ],
)
@pytest.mark.parametrize(
    ("offline", "said"),
    [
        (False, "the hub has no {kind} of that name"),
        (True, "HF_HUB_OFFLINE forbids asking the hub"),
    ],
)
def test_unknown_name_is_said_to_be_neither_folder_nor_hub_id(
    tmp_path, kind, repo_id, change, offline, said
):
    environment = {"HF_HUB_OFFLINE": "1"} if offline else {}
    with start_hub({"owner/name": HubRepo(SMALL)}) as endpoint:
        message = refusal(
            endpoint, tmp_path / "out",
            repo_id=repo_id, kind=kind, files=["a.jsonl"], environment=environment,
        )  # fmt: skip
    setting = {"model": "model.source", "dataset": "data.source"}[kind]
    start = (
        f"{setting} = '{repo_id}': no folder {repo_id} is here, so it was taken as a hub id, and "
    )
    if " " in repo_id:  # no hub is asked for what is no id
        said = "the hub has no {kind} of that name"
    assert message.startswith(f"{start}{said.format(kind=kind)}")
    assert change in message


def test_folder_that_a_missing_one_may_have_meant_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models/my-model").mkdir(parents=True)
    source = Source("models/my-modle", None, "model")
    message = str(explain(source, OfflineModeIsEnabled("offline")))
    assert "no folder models/my-modle is here, but models/my-model is, so it was taken" in message


def test_setting_that_cannot_work_with_the_model_is_refused_before_its_weights_come(tmp_path):
    """With settings that work, at the bound itself, workflow/test_hub_run.py downloads one."""
    repo = HubRepo(MODEL | {"config.json": json.dumps(TINY).encode()})
    runs = {"long": {"data": {"seq_len": 131}}}
    checks = ("--checks", str(settings_file({"trains_here": False, "runs": runs})))
    with start_hub({"owner/name": repo}) as endpoint:
        message = refusal(endpoint, tmp_path / "out", options=checks)
    assert message.startswith(
        "run long: data.seq_len = 131: the model's max_position_embeddings is"
    )
    assert repo.downloads() == ["config.json"]


def test_missing_dataset_file_lists_near_names(tmp_path):
    files = {"data/train.jsonl": b"{}", "data/test.jsonl": b"{}", "README.md": b""}
    with start_hub({"owner/name": HubRepo(files, kind="dataset")}) as endpoint:
        message = refusal(endpoint, tmp_path / "out", kind="dataset", files=["train.jsonl"])
    assert "data.train or data.heldout = 'train.jsonl'" in message
    assert "near names are data/train.jsonl. Set" in message


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_damaged_file_is_refused_removed_and_fetched_again(tmp_path, path):
    repo = HubRepo(SMALL)
    repo.served[path] = bytes(len(SMALL[path]))  # of right size: only a checksum can tell
    with start_hub({"owner/name": repo}) as endpoint:
        message = refusal(endpoint, tmp_path / "out")
        assert f"{path} of owner/name was damaged on the way" in message
        repo.served.clear()
        assert download(endpoint, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / path).read_bytes() == SMALL[path]


def test_repeated_command_fetches_only_what_the_broken_one_lacked(tmp_path):
    repo = HubRepo(MODEL)
    repo.down.add("model-00002-of-00002.safetensors")
    with start_hub({"owner/name": repo}) as endpoint:
        message = refusal(endpoint, tmp_path / "out")
        assert "the download broke off" in message
        assert "repeat the command: finished files are kept" in message
        repo.down.clear()
        repo.requests.clear()
        assert download(endpoint, tmp_path / "out").returncode == 0
    assert "model-00002-of-00002.safetensors" in repo.downloads()
    assert "model-00001-of-00002.safetensors" not in repo.downloads()
    assert not (tmp_path / ".out.partial").exists()


def test_branch_that_moved_between_two_attempts_leaves_no_old_file(tmp_path):
    repo = HubRepo(SMALL | {"vocab.txt": b"old", "merges.txt": b"old"})
    repo.down.add("vocab.txt")  # the last one: all others are there when it fails
    with start_hub({"owner/name": repo}) as endpoint:
        refusal(endpoint, tmp_path / "out")
        commit = repo.commit(SMALL | {"config.json": b'{"new": 1}'})
        assert download(endpoint, tmp_path / "out").returncode == 0
    downloaded = contents(tmp_path / "out")
    assert manifest(tmp_path / "out")["commit"] == commit
    assert downloaded["config.json"] == b'{"new": 1}'
    assert "merges.txt" not in downloaded


def test_unreachable_hub_says_check_the_network(tmp_path):
    with reserved_ports(1) as (port,):  # nobody listens there
        message = refusal(f"http://127.0.0.1:{port}", tmp_path / "out")
    assert "check the network, HF_ENDPOINT if you set it, and repeat the command" in message


def test_existing_output_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with start_hub({"owner/name": HubRepo(SMALL)}) as endpoint:
        result = download(endpoint, tmp_path / "out")
    assert result.returncode == 1
    assert "it exists already. Remove it first." in result.stderr
    assert sorted(contents(tmp_path / "out")) == ["mine.txt"]

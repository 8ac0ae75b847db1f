"""Files on disk: whole or not at all, checkable, traceable without naming the machine."""

import json
import math
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from workflow.lib.system.checksums import write_lines
from workflow.lib.system.files import (
    atomic_path,
    canonical_json,
    file_sha256,
    provenance,
    source_commit,
    unwritable,
    write_checksums,
    write_json,
    write_text,
)


def test_canonical_json_does_not_depend_on_the_order_of_keys():
    assert canonical_json({"b": [1, {"d": None, "c": "é"}], "a": 1}) == (
        '{"a":1,"b":[1,{"c":"é","d":null}]}'
    )


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_text(tmp_path / "f", "old")

    def rows():
        yield {"a": 1}
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError):
        write_lines(tmp_path / "f", rows())
    assert (tmp_path / "f").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_written_file_gets_the_permissions_of_an_ordinary_one(tmp_path):
    (tmp_path / "ordinary").touch()
    write_text(tmp_path / "f", "")
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_number_that_json_cannot_spell_is_refused(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "f.json", {"loss": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_lines(tmp_path / "f.jsonl", [{"loss": number}])
    assert list(tmp_path.iterdir()) == []


def folder_with_checksums(folder):
    (folder / "below").mkdir()
    (folder / "a b.txt").write_text("one")
    (folder / "below" / "c.bin").write_bytes(bytes(range(256)))
    write_checksums(folder)
    return folder


def test_checksums_list_every_file_but_themselves_in_order(tmp_path):
    folder = folder_with_checksums(tmp_path)
    write_checksums(folder)  # again: the list of before is not in it
    assert (folder / "SHA256SUMS").read_text() == "".join(
        f"{file_sha256(folder / name)}  {name}\n" for name in ("a b.txt", "below/c.bin")
    )


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="sha256sum is missing")
def test_sha256sum_accepts_the_checksums_and_notices_a_changed_byte(tmp_path):
    folder = folder_with_checksums(tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    (folder / "a b.txt").write_text("onE")
    assert subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder).returncode == 1


def test_provenance_names_stage_versions_and_time_but_neither_host_nor_folder(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/workflow/scripts/finetune_worker.py"])
    record = provenance()
    assert record["stage"] == "finetune"
    assert record["packages"]["python"] == platform.python_version()
    assert record["created_utc"].endswith("Z")
    text = json.dumps(record)
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text


def test_files_can_be_read_by_those_whom_the_umask_lets(tmp_path):
    mask = os.umask(0o022)
    try:
        with atomic_path(tmp_path / "file") as temporary:
            temporary.chmod(0o600)  # as safetensors leaves it
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_folder_deleted_meanwhile_is_told_and_no_other_missing_file(tmp_path):
    (tmp_path / "results").mkdir()
    said = {}
    for name in ("results/run/step.json", "results/absent"):
        with pytest.raises(FileNotFoundError) as caught:
            (tmp_path / name).read_bytes()
        said[name] = unwritable(caught.value)
    assert said["results/absent"] is None
    assert f"the folder {tmp_path}/results/run is not there" in str(said["results/run/step.json"])


def test_commit_of_a_checkout_that_belongs_to_another_user_is_told(monkeypatch):
    if (commit := source_commit()) is None:
        pytest.skip("these files are no checkout")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    plain = subprocess.run(
        ["git", "describe", "--always"], cwd=Path(__file__).parent, capture_output=True
    )
    assert plain.returncode != 0  # git itself refuses
    assert source_commit() == commit

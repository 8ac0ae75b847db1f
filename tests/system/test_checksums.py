"""Files against their recorded SHA-256: what differs is named, with the folder to delete."""

import errno
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest import mock

import pytest

from tests.support.distributed import run_in_group
from workflow.lib.checkpoints.safetensors_reader import shard_of_tensor
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.system import checksums
from workflow.lib.system.checksums import (
    AHEAD,
    HashedAhead,
    check_files,
    downloaded_files,
    findings,
    listed_files,
    read_artifact,
    read_lines,
    without_weights,
    write_lines,
)
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, write_checked_json, write_checksums

FILES = {"a.safetensors": 70_001, "b.safetensors": 3_000_017, "config.json": 11}
FILES |= {"LICENSE\u2028\x85\x0c": 0}  # Python's splitlines takes these for ends of lines


def made(folder):
    """Write a folder as a stage leaves it: files of odd sizes and their checksums."""
    folder.mkdir(parents=True)
    for name, size in FILES.items():
        (folder / name).write_bytes(bytes(number % 251 for number in range(size)))
    write_checksums(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "base")


def flip(path, position=-1):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def flip_tensor(folder, name):
    """Change the lowest bit of a tensor's first element in a checkpoint; return its file."""
    path = folder / shard_of_tensor(folder)[name]
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    flip(path, start + json.loads(content[8:start])[name]["data_offsets"][0])
    return path


def refused(*folders):
    with pytest.raises(UserError) as caught:
        check_files([file for folder in folders for file in listed_files(folder)], threads=2)
    return str(caught.value)


@pytest.mark.parametrize("position", [0, 2**20, -1])
def test_one_bit_is_told_with_the_file_and_the_folder_to_delete(folder, position):
    flip(folder / "b.safetensors", position)
    assert refused(folder) == (
        f"{folder}/b.safetensors is damaged: it does not have the SHA-256 that was recorded when "
        f"it was made. Delete the folder {folder} and repeat the command; the folder is made again."
    )


def test_missing_file_is_told(folder):
    (folder / "config.json").unlink()
    assert "config.json is damaged: it cannot be read (No such file" in refused(folder)


def test_every_damaged_folder_is_told_at_once(folder, tmp_path):
    other = made(tmp_path / "tokens")
    for path in (folder / "a.safetensors", folder / "config.json", other / "config.json"):
        flip(path)
    message = refused(folder, other)
    assert message.startswith(f"{folder}/a.safetensors is damaged")
    assert f"made again. {other}/config.json is damaged" in message
    assert (
        "\n" not in message
    )  # the end of the terminal shows the first line of a cause, and the last


@pytest.mark.parametrize("name", ["model-2.safetensors", "tokenizer.json"])
def test_file_that_would_be_loaded_must_be_listed(folder, name):
    (folder / name).touch()
    assert f"SHA256SUMS is damaged: it does not list {name}" in refused(folder)


def test_what_is_written_beside_later_need_not_be_listed(folder):
    for name in ("README.md", ".snakemake_timestamp", ".hidden.json"):
        (folder / name).write_text("later")
    check_files(listed_files(folder))


def test_broken_list_is_damage(folder):
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text()[:-20])
    assert f"{sums} is damaged: it " in refused(folder)
    sums.write_text(sums.read_text()[:30])
    assert f"{sums} is damaged: it " in refused(folder)


@pytest.mark.parametrize("lack", [errno.ENOMEM, errno.ESTALE, errno.EACCES])
def test_file_that_cannot_be_read_at_the_moment_is_not_told_as_damage(folder, lack):
    """Who is told so deletes a sound folder."""
    error = OSError(lack, "at the moment")
    with (
        mock.patch.object(checksums, "file_sha256", side_effect=error),
        pytest.raises(OSError, match="at the moment"),
    ):
        check_files(listed_files(folder))


def test_hashing_tells_that_it_moves_after_every_mib(folder):
    moves = []
    findings(listed_files(folder), threads=2, on_progress=lambda: moves.append(None))
    assert len(moves) == sum(-(-size // 2**20) for size in FILES.values())


def pipes(folder, count):
    """Return a file, and named pipes, which a reader opens and then waits for."""
    first = folder / "first"
    first.write_bytes(b"1")
    later = [folder / f"pipe-{number}" for number in range(count)]
    for path in later:
        os.mkfifo(path)
    return first, later


def opened(pipe):
    """Return the writing end of a named pipe, once somebody reads it."""
    for _ in range(6000):
        with suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    raise AssertionError(f"nobody reads {pipe}")


def test_next_files_are_hashed_while_one_is_read(tmp_path):
    first, later = pipes(tmp_path, AHEAD + 1)
    hashes = HashedAhead([first, *later])
    sha256 = hashes.sha256(first)
    for path in later[:AHEAD]:
        writer = opened(path)
        os.write(writer, b"1")
        os.close(writer)
        assert hashes._hashes[path].result() == sha256
    with pytest.raises(OSError, match="No such device"):  # nobody reads the one after them
        os.open(later[AHEAD], os.O_WRONLY | os.O_NONBLOCK)
    hashes.end()


def test_end_stops_a_hash_in_progress(tmp_path):
    first, (pipe, *_) = pipes(tmp_path, 1)
    hashes, begun = HashedAhead([first, pipe]), threading.Event()
    hashes.sha256(first)

    def write():
        with suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
            for _ in range(4096):
                file.write(bytes(2**20))
                begun.set()
            return "all was read"
        return "the reader has stopped"

    with ThreadPoolExecutor() as pool:
        written = pool.submit(write)
        begun.wait()
        hashes.end()
        assert written.result() == "the reader has stopped"


def hash_together(world, folder, damaged):
    """Check a sound and a damaged folder; return what this process hashed, and was told."""
    hashed = []
    original = checksums.file_sha256

    def noted(path, **options):
        hashed.append(path.name)
        return original(path, **options)

    checksums.file_sha256 = noted  # this process ends with the call
    check_recorded(listed_files(folder), world=world)
    mine = list(hashed)
    try:
        check_recorded(listed_files(damaged), world=world)
    except UserError as error:
        return {"hashed": mine, "message": str(error)}
    return {}


def test_processes_share_the_hashing_and_all_are_told(folder, tmp_path):
    damaged = made(tmp_path / "damaged")
    flip(damaged / "a.safetensors")
    results = run_in_group(hash_together, folder, damaged, world_size=3)
    assert sorted(name for result in results for name in result["hashed"]) == sorted(FILES)
    assert all(result["hashed"] for result in results)
    assert {result["message"] for result in results} == {refused(damaged)}


def recorded_as_download(folder):
    """Write the record of a download into a folder, over all files in it; return the folder."""
    files = [
        {"path": path.name, "size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    ]
    record = {"repo_id": "owner/name", "kind": "model", "commit": "0" * 40, "files": files}
    write_checked_json(folder / "source.json", record)
    return folder


def test_download_is_held_to_its_record(tmp_path):
    folder = recorded_as_download(made(tmp_path / "model"))
    check_files(downloaded_files(folder))
    flip(folder / "config.json")
    with pytest.raises(UserError, match=r"model/config\.json is damaged"):
        check_files(without_weights(downloaded_files(folder)))


def test_weights_are_left_to_who_opens_them(tmp_path):
    folder = recorded_as_download(made(tmp_path / "model"))
    flip(folder / "a.safetensors")
    check_files(without_weights(downloaded_files(folder)))


def test_folder_of_the_user_has_no_record(tmp_path):
    assert downloaded_files(made(tmp_path / "model")) == []
    (tmp_path / "model" / "source.json").write_text('{"question": "a data file of that name"}')
    assert downloaded_files(tmp_path / "model") == []


@pytest.mark.parametrize("change", [('"sha256"', '"sha25"'), ('"files"', '"file"'), ("]", "")])
def test_broken_record_of_a_download_is_told(tmp_path, change):
    path = recorded_as_download(made(tmp_path / "model")) / "source.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UserError, match=r"source\.json cannot be read as the record of a download"):
        downloaded_files(path.parent)


VALUE = {"loss": 1.25, "name": "Grüße", "sizes": {10: 1, 9: 2}, "pair": (1, 2)}
READ = {"loss": 1.25, "name": "Grüße", "sizes": {"10": 1, "9": 2}, "pair": [1, 2]}


def test_artifact_is_read_as_json_says_it(tmp_path):
    """Keys become texts, and tuples lists, before the checksum is taken."""
    write_checked_json(tmp_path / "a.json", VALUE)
    assert read_artifact(tmp_path / "a.json") == READ
    write_lines(tmp_path / "a.jsonl", [VALUE, {"text": "a\nb\u2028c"}])
    assert read_lines(tmp_path / "a.jsonl") == [READ, {"text": "a\nb\u2028c"}]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_every_flipped_bit_is_refused_or_means_the_same(tmp_path, kind):
    """It means the same between two fields, or in how a character is spelled."""
    path, damaged = tmp_path / f"whole.{kind}", tmp_path / f"damaged.{kind}"
    if kind == "json":
        write_checked_json(path, VALUE)
    else:
        write_lines(path, [VALUE, VALUE])
    read = read_artifact if kind == "json" else read_lines
    content, messages = path.read_bytes(), list[str]()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << random.Random(place).randrange(8)
        damaged.write_bytes(flipped)
        try:
            found = read(damaged)
        except UserError as error:
            messages.append(str(error))
        else:
            assert found == read(path)
    assert len(messages) > 0.8 * len(content)
    assert all(message.startswith(f"{damaged} is damaged: it ") for message in messages)
    assert all(f"Delete the folder {tmp_path} and repeat" in message for message in messages)


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", "[" * 100_000, '{"sha256": 1}'])
def test_file_without_its_checksum_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json is damaged"):
        read_artifact(tmp_path / "a.json")


def test_missing_file_is_named(tmp_path):
    for read in (read_artifact, read_lines):
        with pytest.raises(UserError, match=r"a\.json: there is no such file"):
            read(tmp_path / "a.json")

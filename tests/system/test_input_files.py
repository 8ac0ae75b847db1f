"""What a user names and what is no file: said at once, by its kind."""

import hashlib
import os
import socket
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import MOST_HASHED_BYTES, Inputs, read_input, why_unreadable


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    Path("file").write_text("Grüße", encoding="utf-8")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("nothing")
    Path("loop").symlink_to("loop")
    socket.socket(socket.AF_UNIX).bind("socket")
    return tmp_path


KINDS = {
    "pipe": "it is a pipe",
    "/dev/zero": "it is a device",
    "socket": "it is a socket",
    "link": "it is a link to nothing, and there is nothing",
    "loop": "it cannot be opened",
    "absent": "there is no such file or folder",
    "x" * 300: "it cannot be opened",
}


@pytest.mark.parametrize(("path", "said"), KINDS.items(), ids=[name[:9] for name in KINDS])
def test_what_cannot_be_read_is_named_by_its_kind(here, path, said):
    assert said in str(why_unreadable(Path(path)))
    assert refusal(read_input, Path(path)).startswith(
        f"{path}: it is " if "it is" in said else f"{path}: "
    )


def test_text_beyond_the_bound_is_not_read(here):
    with pytest.raises(UserError, match=r"file: it has 7 bytes, and at most 6"):
        read_input(Path("file"), most_bytes=6)


def rewrite_in_place(path):
    """Other bytes, as many as before, and the time of change put back."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = {
    "in place, with its old time": rewrite_in_place,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "replaced by another file": lambda path: (
        path.with_suffix(".new").write_bytes(path.read_bytes()[::-1]),
        path.with_suffix(".new").rename(path),
    ),
    "removed": lambda path: path.unlink(),
}
HARMLESS = {
    "nothing": lambda path: None,
    "touched": lambda path: path.touch(),
    "another mode": lambda path: path.chmod(0o600),
    "a file beside it": lambda path: path.with_suffix(".new").touch(),
}


@pytest.mark.parametrize("num_bytes", [7, MOST_HASHED_BYTES + 1], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES)
def test_input_that_changed_while_it_was_read_is_named(tmp_path, change, num_bytes):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" + b"b" * (num_bytes - 1))
    inputs = Inputs([tmp_path])
    CHANGES[change](file)
    with pytest.raises(UserError, match=rf"{file} was .* while it was read\. Nothing .* kept"):
        inputs.check()


@pytest.mark.parametrize("change", HARMLESS)
def test_input_with_the_same_content_is_none_that_changed(tmp_path, change):
    file = tmp_path / "config.json"
    file.write_text("{}")
    inputs = Inputs([tmp_path])
    HARMLESS[change](file)
    inputs.check()


def test_hash_that_was_taken_is_compared_whatever_the_times_say(tmp_path):
    """Not every file system notes a change at once."""
    file = tmp_path / "train.jsonl"
    file.write_text("as it is now")
    inputs = Inputs([], sha256={file: hashlib.sha256(b"as it was hashed").hexdigest()})
    with pytest.raises(UserError, match="changed while it was read"):
        inputs.check()

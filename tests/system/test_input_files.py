"""What a user names and what is no file: said at once, by its kind."""

import os
import socket
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input, why_unreadable


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

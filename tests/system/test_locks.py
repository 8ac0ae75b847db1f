"""Locks: one holder at a time, named to whoever waits, and free as soon as it is dead."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from workflow.lib.system.errors import UserError
from workflow.lib.system.locks import exclusive, temporary_folder

HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from workflow.lib.system.locks import exclusive, temporary_folder
with exclusive(Path({path!r}), doing="testing"):
    print("held", flush=True)
    time.sleep({seconds})
"""


def start_holder(path, *, seconds):
    """Start a process that holds the lock; return when it does."""
    root = str(Path(__file__).parents[2])
    script = HOLDER.format(root=root, path=str(path), seconds=seconds)
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_second_process_is_refused_with_the_first_ones_number_until_that_is_dead(tmp_path):
    """The kernel frees the lock, whatever kills the process."""
    path = tmp_path / "run" / ".lock"
    holder = start_holder(path, seconds=3600)
    try:
        with pytest.raises(UserError) as caught, exclusive(path, doing="testing"):
            pass
        assert str(caught.value) == (
            f"{path.parent} is in use: process {holder.pid} is testing. Wait for it, or stop it "
            f"(kill {holder.pid}), and repeat the command; it continues from what is finished."
        )
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with exclusive(path, doing="testing") as killed:
        assert killed == str(holder.pid)
        assert path.read_text() == str(os.getpid())


def test_second_process_waits_for_one_that_is_about_to_end(tmp_path):
    path = tmp_path / ".lock"
    holder = start_holder(path, seconds=2)
    with exclusive(path, doing="testing", wait_s=1800):
        assert holder.wait() == 0
        assert path.read_text() == str(os.getpid()), "what it holds is no file that was removed"


def test_lock_is_free_again_after_the_block_and_leaves_no_file(tmp_path):
    for _ in range(2):
        with exclusive(tmp_path / ".lock", doing="testing") as killed:
            assert killed is None, "the one before has ended in order"
            assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
        assert list(tmp_path.iterdir()) == []


def test_holder_that_fails_was_not_killed(tmp_path):
    with pytest.raises(KeyError), exclusive(tmp_path / ".lock", doing="testing"):
        raise KeyError
    with exclusive(tmp_path / ".lock", doing="testing") as killed:
        assert killed is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_named_with_the_cure(tmp_path, number):
    lacks = mock.patch("fcntl.flock", side_effect=OSError(number, os.strerror(number)))
    with (
        lacks,
        pytest.raises(UserError, match=rf"{tmp_path}: its file system has no locks .* lockd"),
        exclusive(tmp_path / ".lock", doing="testing"),
    ):
        pass


HOLD = """
import sys
from workflow.lib.system.locks import temporary_folder
with temporary_folder("work-", parent=sys.argv[1]) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder with a file, and the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, Path(process.stdout.readline().decode().strip())
        process.kill()


def fail_within(folder, error):
    with temporary_folder("work-", parent=str(folder)) as made:
        (made / "below").mkdir()
        raise error


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, KeyboardInterrupt])
def test_folder_is_gone_after_the_block_and_after_an_error(tmp_path, error):
    with pytest.raises(error):
        fail_within(tmp_path, error)
    assert [*tmp_path.iterdir()] == []


def test_folder_of_a_live_process_stays(tmp_path, holder):
    with temporary_folder("work-", parent=str(tmp_path)):
        assert (holder[1] / "file").exists()


def test_folder_of_a_killed_process_is_removed_by_the_next_one_and_no_other_is(tmp_path, holder):
    process, left = holder
    (tmp_path / "others").mkdir()
    (tmp_path / "work-link").symlink_to(tmp_path / "others")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert left.exists()
    with temporary_folder("work-", parent=str(tmp_path)):
        assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"others", "work-link"}

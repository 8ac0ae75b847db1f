"""The stage `tokenize_dataset` on several processes, killed, stopped and started again; and as a
command."""

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.support.tokenizing import SEQ_LEN, rows, save_rows
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.data.reading.row_chunks import Row
from workflow.lib.data.tokens.corpus import FEW_CHUNKS
from workflow.lib.data.tokens.encoded_shards import encode_rows, is_finished
from workflow.lib.data.tokens.overlong import Begun
from workflow.lib.data.tokens.token_store import ARRAYS
from workflow.lib.data.tokens.work_folder import work_folder
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256
from workflow.scripts.tokenize_dataset import make_splits, prepare_splits


def many_files(stage):
    """Save more chunks than one process encodes alone; return their glob."""
    for number in range(2 * FEW_CHUNKS):
        save_rows(stage.folder / f"part{number:02d}.jsonl", [*rows(5, start=5 * number), "{broken"])
    return str(stage.folder / "part*.jsonl")


def digests(stage):
    """The digests of what the stage wrote, provenance aside."""
    return {path.name: file_sha256(path) for path in stage.output.glob("*.[nj]*[yl]")}


def test_any_number_of_processes_writes_the_same_bytes(stage):
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    written = []
    for processes in (1, 3):
        stage.processes = processes
        stage.run(**settings)
        written.append(digests(stage))
    assert len(written[0]) == len(ARRAYS) + 2
    assert written[0] == written[1]


def test_killed_run_goes_on_without_encoding_finished_shards_again(stage):
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    stage.run(**settings)
    undisturbed = digests(stage)
    shutil.rmtree(stage.output)

    stage.processes = 2
    work = stage.folder / f".{stage.output.name}.work"
    killed = subprocess.Popen(stage.command_line(**settings), stderr=subprocess.DEVNULL)
    while len(list(work.glob("*/*.facts.json"))) < FEW_CHUNKS and killed.poll() is None:
        time.sleep(0.001)
    workers = children(killed.pid)
    killed.kill()
    killed.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))  # no orphan goes on writing
    finished = {path: path.stat().st_mtime_ns for path in finished_shards(work)}
    assert finished
    assert not stage.output.exists()

    again = resumed_times(stage, settings, finished)
    assert again == finished
    assert digests(stage) == undisturbed
    assert not work.exists()


def finished_shards(work):
    """Return the facts of shards that are whole: a kill may leave one half written."""
    facts = work.glob("*/*.facts.json")
    return [path for path in facts if is_finished(Path(str(path).removesuffix(".facts.json")))]


def resumed_times(stage, settings, finished):
    """Run to the end; return when the shards in `finished` were last written, seen before they
    go."""
    seen: dict[Path, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "workflow.scripts.tokenize_dataset.make_splits",
            lambda *args, **kwargs: (
                seen.update({path: path.stat().st_mtime_ns for path in finished})
                or make_splits(*args, **kwargs)
            ),
        )
        stage.run(**settings)
    return seen


def test_parts_of_other_settings_are_kept_and_named_in_the_log(tmp_path, caplog):
    other = tmp_path / ".demo-0123456789ab.work"
    other.mkdir()
    with caplog.at_level("INFO", "workflow"), work_folder(tmp_path / "demo-ba9876543210", key="k"):
        assert str(other) in caplog.text
    assert other.is_dir()


@pytest.mark.parametrize("part", ["ids.npy", "table.npy", "facts.json"])
def test_part_that_a_power_cut_left_half_written_is_not_taken_up(part, tmp_path):
    stem = tmp_path / "train-00000-0000000"
    document = Encoded(np.arange(9, dtype=np.uint32), np.arange(9) > 0, held_special_text=False)
    encode_rows(
        [Row(1, {})],
        begin=lambda _: Begun(lambda: [document]),
        keys=KeyAudit(),
        seq_len=SEQ_LEN,
        overlong="drop",
        stem=stem,
    )
    assert is_finished(stem)
    path = Path(f"{stem}.{part}")
    path.write_bytes(path.read_bytes()[:-4] + b"\xa5\xa5\xa5\xa5")
    assert not is_finished(stem)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_leaves_no_process_behind(stage, stop):
    stage.processes = 2
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    run = subprocess.Popen(stage.command_line(**settings), stderr=subprocess.DEVNULL)
    wait_until(lambda: len(children(run.pid)) >= 3 or run.poll() is not None)
    family = children(run.pid)
    run.send_signal(stop)
    assert run.wait() != 0 or not family
    wait_until(lambda: not any(alive(pid) for pid in family))


def children(pid):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            parents[int(path.parent.name)] = int(text.rsplit(")", 1)[1].split()[1])
    pids = [pid]
    for number in pids:
        pids += [child for child, parent in parents.items() if parent == number]
    return pids[1:]


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def wait_until(condition, *, seconds=1800):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_rows_that_change_while_they_are_read_leave_no_tokens(stage):
    """Rewritten in place once they are encoded, with as many bytes."""

    def change(*args, **kwargs):
        stage.train.write_text(stage.train.read_text().replace("answer", "ANSWER"))
        return prepare_splits(*args, **kwargs)

    with (
        mock.patch("workflow.scripts.tokenize_dataset.prepare_splits", change),
        pytest.raises(UserError, match=rf"{stage.train} was changed while it was read"),
    ):
        stage.run()
    assert [path.name for path in stage.folder.glob("*tokens*")] == []
    stage.run()

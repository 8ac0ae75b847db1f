"""Leases on GPUs: real processes that compete for the lock files of made-up cards."""

import os
import re
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.lease_holder import NUM_CARDS, cards
from tests.support.workflow_project import REPOSITORY, Project, make_project
from workflow.lib.artifacts.stage_logs import failure_causes
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_leases import IN_USE_BYTES, lease


def start_holder(folder, count, *, seconds=1.0):
    arguments = [str(folder / "locks"), str(count), str(folder / "journal"), str(seconds)]
    command = [sys.executable, "-m", "tests.support.lease_holder", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY)


def journal(folder):
    """Return what the jobs wrote: begin or end, process, cards."""
    lines = (folder / "journal").read_text().splitlines() if (folder / "journal").exists() else []
    fields = (line.split() for line in lines)
    return [(sign, process, set(names.split(","))) for sign, process, names in fields]


def wait_for(folder, lines):
    deadline = time.monotonic() + 1800
    while len(journal(folder)) < lines:
        assert time.monotonic() < deadline, f"{journal(folder)}"
        time.sleep(0.05)


def held_over_time(folder):
    """Return the cards of every job at work, after each line of the journal."""
    held = {}
    states = []
    for sign, process, names in journal(folder):
        held = (
            held | {process: names}
            if sign == "+"
            else {k: v for k, v in held.items() if k != process}
        )
        states.append(held)
    return states


def test_no_card_is_ever_leased_twice(tmp_path):
    jobs = [start_holder(tmp_path, 2, seconds=0.3) for _ in range(10)]
    assert [job.wait() for job in jobs] == [0] * 10
    assert len(journal(tmp_path)) == 2 * len(jobs)
    for held in held_over_time(tmp_path):
        assert len(set().union(*held.values())) == sum(map(len, held.values()))


@pytest.fixture(scope="module")
def full_host(tmp_path_factory):
    """Five jobs of two cards each on a host with eight; one of those that got cards is killed in
    time."""
    folder = tmp_path_factory.mktemp("leases")
    jobs = {job.pid: job for job in (start_holder(folder, 2, seconds=600) for _ in range(5))}
    wait_for(folder, NUM_CARDS // 2)
    time.sleep(0.5)  # in which the fifth looks for cards again and again
    (folder / "early").write_text((folder / "journal").read_text())
    killed = jobs.pop(int(journal(folder)[0][1]))
    killed.kill()
    killed.wait()
    wait_for(folder, NUM_CARDS // 2 + 1)
    yield folder
    for job in jobs.values():
        job.kill()
        job.wait()


def test_four_jobs_of_two_cards_work_at_once_on_eight_and_the_fifth_waits(full_host):
    lines = (full_host / "early").read_text().splitlines()
    early = [name for line in lines for name in line.split()[2].split(",")]
    assert sorted(early) == [f"GPU-{number}" for number in range(NUM_CARDS)]


def test_killed_job_leaves_its_cards_to_the_one_that_waits(full_host):
    first, last = journal(full_host)[0], journal(full_host)[-1]
    assert (last[0], last[2]) == ("+", first[2])


def test_cards_that_other_programs_use_are_not_taken(tmp_path):
    busy, free = cards(used_bytes=IN_USE_BYTES + 1)[:6], cards(used_bytes=IN_USE_BYTES)[6:]
    assert lease(2, gpus=lambda: [*busy, *free], folder=tmp_path / "locks") == free


def test_wait_says_which_card_is_in_use(tmp_path):
    """The other program ends after the first look."""
    looks = iter([cards(used_bytes=3 * 2**30)[:1], cards()[:1]])
    said = []
    lease(1, gpus=lambda: next(looks), folder=tmp_path / "locks", waiting=said.append)
    assert said == ["waiting for 1 of 1 GPU(s): GPU-0 has 3.0 GiB in use by another program"]


def test_smaller_cards_than_the_plan_counts_on_are_not_taken(tmp_path):
    small = replace(cards()[0], total_bytes=2**32)
    large = cards()[1:3]
    assert lease(2, gpus=lambda: [small, *large], folder=tmp_path / "locks") == large


def test_more_cards_than_there_are_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"9 GPU\(s\) are asked for, 8 are visible here"):
        lease(9, gpus=cards, folder=tmp_path / "locks")


def test_folder_that_cannot_be_used_is_one_message(tmp_path):
    (tmp_path / "locks").write_text("")
    with pytest.raises(UserError, match="folder of GPU leases cannot be used"):
        lease(1, gpus=cards, folder=tmp_path / "locks")


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_user_of_the_host_may_lease_whatever_the_umask(tmp_path, umask, made_before):
    locks = tmp_path / "locks"
    before = os.umask(umask)
    try:
        if made_before:
            locks.mkdir()
            (locks / "GPU-0").touch()
        lease(1, gpus=cards, folder=locks)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
    assert stat.S_IMODE((locks / "GPU-0").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "plant",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to("nothing"),
        lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    ],
    ids=["pipe", "folder", "link", "dangling link", "socket"],
)
def test_what_is_no_file_in_a_lock_s_place_is_refused_at_once(tmp_path, plant, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    Path("locks").mkdir()
    plant(Path("locks/GPU-0"))
    with pytest.raises(UserError, match="folder of GPU leases cannot be used"):
        lease(1, gpus=cards, folder=Path("locks"))


def test_folder_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "locks").symlink_to("elsewhere")
    with pytest.raises(UserError, match="folder of GPU leases cannot be used"):
        lease(1, gpus=cards, folder=tmp_path / "locks")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_lock_stays_with_the_program_that_takes_the_process_place(tmp_path):
    """A stage is started by exec, so that signals and exit status are its own."""
    program = (
        "import os, sys; from pathlib import Path; from tests.support.lease_holder import cards;"
        "from workflow.lib.system.gpu_leases import lease;"
        f"lease(8, gpus=cards, folder=Path({str(tmp_path / 'locks')!r}));"
        "os.execvp('sh', ['sh', '-c', 'echo leased; read line'])"
    )
    stage = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert stage.stdout.readline() == b"leased\n"
    other = start_holder(tmp_path, 1, seconds=0)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=1)
    stage.communicate(b"\n")
    assert other.wait() == 0


def test_job_without_gpus_sees_none_and_is_not_told_as_killed_before_it_begins(tmp_path):
    lease_gpus = [sys.executable, "-m", "workflow.scripts.lease_gpus", "--count", "0"]
    lease_gpus += ["--log", str(tmp_path / "demo.log"), "--"]
    shown = subprocess.run(
        [*lease_gpus, "sh", "-c", "echo :$CUDA_VISIBLE_DEVICES: $1", "sh", "a b; c"],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == ":: a b; c\n"
    assert failure_causes(tmp_path, since=0) == []


DRIVER = {"PYTHONPATH": str(REPOSITORY / "tests" / "fake_driver")}


@pytest.mark.parametrize(("all_cores", "of_one", "of_two"), [(32, "4", "8"), (3, "1", "2")])
def test_jobs_get_the_share_of_the_cores_that_belongs_to_their_gpus(
    tmp_path, all_cores, of_one, of_two
):
    """Of eight cards, so that as many jobs run at once as there are cards for; never less than a
    core a card."""
    project = replace(make_project(tmp_path, hardware={"gpus": 2}), environment=DRIVER)
    done = project.run("--cores", str(all_cores), "--dry-run", "train")
    threads = {
        rule: re.findall(rf"^rule {rule}:\n(?:    .*\n)*?    threads: (\d+)", done.output, re.M)
        for rule in ("quantize_base", "finetune")
    }
    # Snakemake leaves out what is 1.
    assert threads == {"quantize_base": [of_one] if of_one != "1" else [], "finetune": [of_two]}


def test_snakemake_counts_the_cards_that_are_visible(finished_project, tmp_path):
    copy = finished_project.copy(tmp_path / "project")
    copy.edit({"hardware": {"gpus": 4}})
    driver = DRIVER | {"CUDA_VISIBLE_DEVICES": "GPU-3,5,6"}
    target = "results/runs/demo/finetune/summary.json"
    done = Project(copy.root, environment=driver).snakemake("--forcerun", "finetune", "--", target)
    # A request of four cannot be met, and is logged as one of as many as there are.
    logs = (copy.root / ".snakemake" / "log").glob("*.log")
    assert ", gpu=3" in max(logs, key=lambda path: path.stat().st_mtime).read_text()
    assert "this machine shows 3 GPU(s)" in done.output

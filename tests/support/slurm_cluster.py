"""A real Slurm on this machine: a controller and several node daemons, started and ended by their
process ids.

with running_cluster(tmp_path, nodes=2) as cluster:
    job = cluster.wait_for_job("finetune")      # its id, once it runs
    cluster.cut_power(job)                      # its node is gone, and all that runs there

It needs root, Debian's packages `slurm-wlm` and `munge`, and an /etc/slurm without a configuration:
Snakemake's plugin takes the variables of Slurm, SLURM_CONF too, from its jobs. Without accounting,
as small clusters are.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.shared import reserved_ports

ETC = Path("/etc/slurm")
TIMEOUT_S = 1800.0  # on a busy machine

CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def lack() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        return "Slurm is not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "only root may start node daemons"
    return f"{ETC} belongs to another cluster" if (ETC / "slurm.conf").exists() else None


@dataclass(frozen=True)
class Cluster:
    """A running cluster; `daemons` are the node daemons by node."""

    folder: Path
    daemons: dict[str, psutil.Process] = field(default_factory=dict)

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S
        ).stdout

    def jobs(self) -> list[dict[str, str]]:
        names = ("id", "comment", "state")
        lines = self.ask("squeue", "--noheader", "--states=all", "--format=%i|%k|%T").splitlines()
        return [dict(zip(names, line.split("|"), strict=True)) for line in lines]

    def facts(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        words = self.ask("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(self, rule: str, *, state: str = "RUNNING") -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = [job for job in self.jobs() if rule in job["comment"]]
            if found and (newest := max(found, key=lambda job: int(job["id"])))["state"] == state:
                return newest["id"]
            assert time.monotonic() < deadline, f"no job of {rule} is {state}: {self.jobs()}"
            time.sleep(0.3)

    def preempt(self, job: str) -> None:
        """Take a job's nodes for an urgent one that ends at once; the job is queued again, without
        its usual wait."""
        before = int(self.facts(job)["Restarts"])
        places = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        self.ask("sbatch", "--wait", *places, "--wrap=true")
        assert int(self.facts(job)["Restarts"]) == before + 1, f"{self.facts(job)} is not preempted"
        self.hurry(job)

    def hurry(self, job: str) -> None:
        """Let a job that is queued again start now: Slurm waits two minutes with it."""
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def cut_power(self, job: str) -> None:
        """Kill the node that a job runs on, daemon and processes; return when the controller has
        noticed."""
        node = self.facts(job)["NodeList"]
        before = int(self.facts(job)["Restarts"])
        for victim in [self.daemons[node], *_steps(job)]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        deadline = time.monotonic() + TIMEOUT_S
        while int(self.facts(job)["Restarts"]) == before:
            assert time.monotonic() < deadline, (
                f"the loss of {node} is not noticed: {self.facts(job)}"
            )
            time.sleep(0.5)
        self.hurry(job)


@contextmanager
def running_cluster(folder: Path, *, nodes: int) -> Iterator[Cluster]:
    """Start a cluster with two made-up GPUs a node in a partition `normal`, and one `urgent` that
    preempts it."""
    folder.mkdir(parents=True)
    ETC.mkdir(exist_ok=True)
    names = [f"n{number}" for number in range(1, nodes + 1)]
    links = [ETC / "slurm.conf", ETC / "gres.conf"]
    cluster = Cluster(folder)
    with reserved_ports(nodes + 1) as ports:
        _write_configuration(folder, names, ports)
        for link in links:
            link.symlink_to(folder / link.name)
        try:
            _start(cluster, names)
            yield cluster
        finally:
            for link in links:
                link.unlink()
            _end([_daemon(folder / "slurmctld.pid"), *cluster.daemons.values()])


def _start(cluster: Cluster, names: list[str]) -> None:
    subprocess.run(["slurmctld", "-i"], check=True, timeout=TIMEOUT_S, capture_output=True)
    for name in names:
        subprocess.run(["slurmd", "-N", name], check=True, timeout=TIMEOUT_S, capture_output=True)
        cluster.daemons[name] = _daemon(cluster.folder / f"slurmd-{name}.pid")
    _wait_until_idle(cluster, len(names))


def _write_configuration(folder: Path, names: list[str], ports: list[int]) -> None:
    host = socket.gethostname().split(".")[0]
    lines, cards = [CONFIG.format(host=host, folder=folder, port=ports[0])], []
    for name, port in zip(names, ports[1:], strict=True):
        for number in range(2):
            os.mknod(folder / f"gpu-{name}-{number}", 0o020666, os.makedev(1, 3))  # like /dev/null
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "RealMemory=64000 Gres=gpu:2\n"
        )
        cards.append(f"NodeName={name} Name=gpu File={folder}/gpu-{name}-[0-1]\n")
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "gres.conf").write_text("".join(cards))


def _daemon(path: Path) -> psutil.Process:
    deadline = time.monotonic() + TIMEOUT_S
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.1)
    return psutil.Process(int(path.read_text()))


def _end(daemons: list[psutil.Process]) -> None:
    """End the daemons, and the jobs, which outlive them: the only ones here, as /etc/slurm had no
    other cluster."""
    ours = [*daemons, *_steps("")]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=TIMEOUT_S)


def _steps(job: str) -> list[psutil.Process]:
    """Return the processes that stand for a job's steps on a node, and all below them; of every job
    for ""."""
    found: list[psutil.Process] = []
    mark = f"slurmstepd: [{job}." if job else "slurmstepd: ["
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or ()).startswith(mark):
            with suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
    return found


def _wait_until_idle(cluster: Cluster, nodes: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (
        cluster.ask("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T").split()
        != ["idle"] * nodes
    ):
        assert time.monotonic() < deadline, "the nodes do not come up"
        time.sleep(0.1)

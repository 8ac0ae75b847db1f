"""This interpreter: its environment for shell commands and workers, its imports, and its node of a
run.

Slurm starts one launcher per node (`srun --ntasks-per-node=1`), and its environment names the node.
The step starts on the first node, so the workers meet at its address."""

import ctypes
import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workflow.lib.system.errors import setting_error

SOURCES = Path(__file__).parents[3]  # the workflow's folder, or that of installed packages
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_VARIABLE = "FINETUNE_LAUNCHER"  # process id of a worker's launcher


def use_this_interpreter(root: Path) -> None:
    """Let `python -m workflow.scripts.<stage>` run by this interpreter from any folder (root: the
    workflow's), in this process and its children; a conda environment takes precedence."""
    search = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    os.environ["PATH"] = os.pathsep.join(search)
    modules = [str(root), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, modules))


def shipped_path(name: str) -> str:
    """Return the path of a file that comes with the workflow (`envs/gguf.txt`), as a user's shell
    needs it in this folder. An installed library has no `envs/`: these are in its repository."""
    if not (SOURCES / name).exists():
        return f"{name} of the workflow's repository"
    return name if Path.cwd() == SOURCES else shlex.quote(str(SOURCES / name))


def is_worker() -> bool:
    """Tell whether this process was started by torchrun (or by `launch_workers`)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def importing() -> Iterator[None]:
    """Import packages without garbage collection, in a quarter less time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


# Above the ports of system services, below Linux's for outgoing connections (32768 on).
FIRST_PORT, PORTS = 20000, 10000


@dataclass(frozen=True)
class RunNode:
    """A node of a run. address, port: of the run's first node."""

    nodes: int
    index: int
    address: str
    port: int
    run_id: str


ALONE = RunNode(nodes=1, index=0, address="127.0.0.1", port=0, run_id="")


def follows(environment: Mapping[str, str]) -> bool:
    """Tell whether this process works for a launcher on another node: not a step's first."""
    several = environment.get("SLURM_STEP_NUM_NODES", "1") != "1"
    return several and environment.get("SLURM_NODEID", "0") != "0"


def find_node(nodes: int, environment: Mapping[str, str]) -> RunNode:
    """Return this process's place, from Slurm's variables of a step; `ALONE` for one node. Raises
    `UserError` if the run needs several nodes and this is no step on as many."""
    if nodes == 1:
        return ALONE
    started = environment.get("SLURM_STEP_NUM_NODES", "1")
    if started != str(nodes):
        raise setting_error(
            "hardware.nodes",
            nodes,
            f"this run was started on {started} node(s)",
            f"Run with --profile {shipped_path('workflow/profiles/slurm')}, or set it to 1",
        )
    job = int(environment["SLURM_JOB_ID"])
    return RunNode(
        nodes=nodes,
        index=int(environment["SLURM_NODEID"]),
        address=environment["SLURM_LAUNCH_NODE_IPADDR"],
        port=FIRST_PORT + job % PORTS,
        run_id=str(job),
    )


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also a suspended one; end it if
    process `parent` has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)

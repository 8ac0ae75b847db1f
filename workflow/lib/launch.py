"""Starting the processes of a run through torchrun's own API, and naming the process that failed first."""

import math
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workflow.lib.errors import StoppedError, UserError
from workflow.lib.nodes import ALONE, Place
from workflow.lib.rendezvous import LOOPBACK, use_loopback

MEETING_S = 900  # for the slowest node to start Python from a shared disk
STOPPED = "training was stopped by a signal; the same command continues from the last checkpoint"


def launch_workers(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    place: Place = ALONE,
    grace_s: float = 60.0,
    deterministic: bool = False,
    what: str = "training",
) -> None:
    """Run `python -m module arguments` in `processes` torchrun workers; return when all have ended well.

    `place` says which share of them this machine starts, and where all meet. Every node of the run calls this.

    Raises `UserError` naming the rank that failed first, and `StoppedError` if stopped by a signal
    (workers get the signal and `grace_s` to save a checkpoint). what: the work, for the message.
    """
    local = processes // place.nodes
    cores = len(os.sched_getaffinity(0))  # of a shared machine, what the job may use
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local)))
    # Growing segments waste 2.5% where fixed ones waste 10%; `memory.ALLOCATOR_SLACK` counts on it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if deterministic:  # docs.nvidia.com/cuda/cublas, "Results reproducibility"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # read by torch; without it workers are killed 30 s after the signal
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s))
    # torchrun knows no SIGUSR1, which clusters send before they take a machine back
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    config = LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=local,
        max_restarts=0,
        monitor_interval=0.2,
        **_rendezvous(place),
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == os.EX_TEMPFAIL:
            raise StoppedError(STOPPED) from None
        cause = (
            f"killed by {failure.signal_name()}"
            if failure.exitcode < 0
            else f"exit status {failure.exitcode}"
        )
        raise UserError(
            f"{what} stopped: process {rank} of {processes} failed first ({cause}); its message stands above and "
            "in the log. Repeat the command to continue from what is finished."
        ) from None
    except SignalException:
        raise StoppedError(STOPPED) from None


def _rendezvous(place: Place) -> dict[str, Any]:
    """Return where the workers meet: on this machine alone, or at the first node of the allocation."""
    if place.nodes == 1:
        use_loopback()
        return {"run_id": uuid.uuid4().hex, "rdzv_backend": LOOPBACK}
    return {
        "run_id": place.run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{place.address}:{place.port}",
        "rdzv_configs": {"rank": place.index, "timeout": MEETING_S},
    }

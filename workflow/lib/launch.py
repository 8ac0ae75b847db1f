"""Starting the processes of a run through torchrun's own API, and naming the process that failed first."""

import math
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workflow.lib.errors import StoppedError, UserError
from workflow.lib.rendezvous import LOOPBACK, use_loopback

STOPPED = "training was stopped by a signal; the same command continues from the last checkpoint"


def launch_workers(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    grace_s: float = 60.0,
    deterministic: bool = False,
    what: str = "training",
) -> None:
    """Run `python -m module arguments` in `processes` torchrun workers on this machine; return when all have ended well.

    Raises `UserError` naming the rank that failed first, and `StoppedError` if stopped by a signal
    (workers get the signal and `grace_s` to save a checkpoint). what: the work, for the message.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # Growing segments waste 2.5% where fixed ones waste 10%; `memory.ALLOCATOR_SLACK` counts on it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    use_loopback()
    if deterministic:  # docs.nvidia.com/cuda/cublas, "Results reproducibility"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # read by torch; without it workers are killed 30 s after the signal
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s))
    # torchrun knows no SIGUSR1, which clusters send before they take a machine back
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.2,
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

"""A worker for the tests of the launcher: `python -m tests.launch_worker <behaviour> <folder>`."""

import os
import signal
import sys
import time
from pathlib import Path

behaviour, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])

if behaviour == "note":
    keys = ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    (folder / str(rank)).write_text(" ".join(os.environ[key] for key in keys))
elif behaviour == "raise in 1":
    if rank == 1:
        raise RuntimeError("a defect")
    time.sleep(60)
elif behaviour == "kill 1":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif behaviour == "stopped":
    sys.exit(os.EX_TEMPFAIL)
elif behaviour == "wait":
    from workflow.lib.parallel import die_with_parent

    die_with_parent()
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / str(rank))
    time.sleep(120)

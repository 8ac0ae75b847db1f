"""The stages as command-line programs: in what order.

`python -m workflow.scripts.<stage> --help` explains each. What is set here holds before any stage
imports a package: progress bars, the packages' own ones included, are for terminals only; two
packages' advice to programmers stays out of the user's sight; no package fetches compiled code from
a hub, or compiles its own; Ctrl-C during the imports, which take seconds, ends the stage without a
traceback; and no garbage is looked for meanwhile, which is a tenth of their time.
"""

import gc
import logging
import os
import signal
import sys
from types import FrameType


def leave(signum: int, frame: FrameType | None) -> None:
    """End at once with the status of Ctrl-C: nothing is begun yet.

    Packages catch exceptions of their imports.
    """
    os._exit(128 + signum)


if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")
# Where the package `kernels` is installed, Transformers and bitsandbytes have it download compiled
# code and run that. None is Python's word for "there is no such module".
sys.modules["kernels"] = None  # type: ignore[assignment]
os.environ["USE_HUB_KERNELS"] = "NO"  # read by Transformers
# bitsandbytes wraps what has no kernel on the CPU in torch.compile, which is imported for that (a
# fifth of a stage's start) and wants a C++ compiler when a weight with an odd number of columns is
# decoded.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# But one kernel, that of flex attention, which needs no pool of processes that compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It advises to install a package that downloads kernels.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a model object is passed, not a name
# Python's word for "the module to run is still being looked for": a stage starts, nobody merely
# imports one. Both hold until `command.run`.
if sys.argv[0] == "-m":
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)

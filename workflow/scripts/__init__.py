"""The stages as command-line programs: the order of work.

`python -m workflow.scripts.<stage> --help` explains each. Settings made here hold before any stage
imports a package: progress bars, also the packages' own, are for terminals only; two packages'
advice to programmers is hidden; no package fetches compiled code from a hub, or compiles its own;
Ctrl-C during the imports, which take seconds, ends the stage without a traceback; garbage
collection, a quarter of their time, is off; and Transformers does not see packages that it would
import for nothing."""

import gc
import logging
import os
import signal
import sys
from types import FrameType

# Packages that Transformers imports where they are, and that these stages do without: torch takes
# 1.1 s of 2.4 s of processor time, scipy with scikit-learn (losses of detectors) 0.3 s of 3.6.
MODEL_STAGES = ("describe_model", "quantize_base", "finetune_worker", "consolidate", "export_step")
UNUSED = {
    **dict.fromkeys(("tokenize_dataset", "preview"), ("torch",)),
    **dict.fromkeys(MODEL_STAGES, ("scipy", "sklearn")),
}


def leave(signum: int, frame: FrameType | None) -> None:
    """End at once with the status of Ctrl-C: nothing is begun yet.

    Packages catch exceptions of their imports.
    """
    os._exit(128 + signum)


if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")
# If the package `kernels` is installed, Transformers and bitsandbytes let it download compiled code
# and run it. None marks a module as missing.
sys.modules["kernels"] = None  # type: ignore[assignment]
os.environ["USE_HUB_KERNELS"] = "NO"  # Transformers reads it
# bitsandbytes wraps operations without a CPU kernel in torch.compile, which it imports for that (a
# fifth of a stage's start) and which needs a C++ compiler to decode a weight with an odd number of
# columns.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Except for one kernel, flex attention's, which needs no pool of compiling processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It advises to install a package that downloads kernels.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a model object is passed, not a name
# Python's argv[0] while it searches the module to run: a stage starts, it is not merely imported.
# Both hold until `command.run`.
if sys.argv[0] == "-m":
    gc.disable()
    for stage, packages in UNUSED.items():
        if f"{__name__}.{stage}" in sys.orig_argv:
            sys.modules |= dict.fromkeys(packages)  # type: ignore[arg-type]
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)

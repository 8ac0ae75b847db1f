"""The stages as command-line programs: in what order. `python -m workflow.scripts.<stage> --help` explains each.

What is set here holds before any stage imports a package: progress bars, the packages' own ones included,
are for terminals only; and two packages' advice to programmers stays out of the user's sight.
"""

import logging
import os
import sys

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")
logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # install a package that downloads kernels
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a model object is passed, not a name

"""Run what `python SCRIPT ...` or `python -m MODULE ...` does: by this module the preloaded Python
forks it.

preloaded_python -m tests.support.run_script SCRIPT ..."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")

"""Run `python -m MODULE ...`, and kill it when it would rename a file to this name.

preloaded_python -m tests.support.killed_at NAME MODULE ..."""

import os
import runpy
import signal
import sys
from pathlib import Path


def kill_at(name):
    def hook(event, arguments):
        if event == "os.rename" and Path(arguments[1]).name == name:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    _, name, module, *_ = sys.argv
    del sys.argv[:2]
    sys.addaudithook(kill_at(name))
    runpy.run_module(module, run_name="__main__", alter_sys=True)

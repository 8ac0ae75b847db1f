"""The processors that numeric tests are run with: only what this one has, and all of it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import processors
from tests.support.processors import AS_IT_IS, PROCESSORS, drawn, flags, lines, supported

SCRIPT = Path(processors.__file__)
CPUINFO = "processor\t: 0\nmodel name\t: a processor\nflags\t\t: fpu sse4_2 avx2 fma\n"
ASK = "import torch; print(torch.backends.cpu.get_cpu_capability())"
HERE = supported(flags(processors.CPUINFO.read_text()))


def shell(command: str) -> list[str]:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_only_what_a_processor_has_is_drawn():
    """Told to use more, ATen dies of an illegal instruction."""
    assert [*supported(flags(CPUINFO))] == ["sse4", "avx2"]
    assert supported(flags("Features\t: fp asimd\n")) == AS_IT_IS


def test_commits_draw_every_setting():
    assert {drawn(f"{number:040x}", PROCESSORS) for number in range(9)} == {*PROCESSORS}


def test_script_says_and_exports_the_setting_of_a_commit():
    commit = f"{7:040x}"
    name = drawn(commit, HERE)
    said, *exported = shell(
        f'eval "$({sys.executable} {SCRIPT} {commit})"; '
        "env | grep -E '^(ATEN_CPU|MKL_ENABLE|ONEDNN_MAX)' | sort"
    )
    assert name in said
    assert exported == sorted(f"{key}={x}" for key, x in HERE[name].variables.items())
    assert shell(f"{sys.executable} {SCRIPT} {name}") == lines(name, HERE[name])
    assert shell(f"{sys.executable} {SCRIPT}") == [*HERE]


def test_torch_takes_the_setting():
    told = next(iter(HERE.values())).variables
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | told, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().lower() in told.get("ATEN_CPU_CAPABILITY", done.stdout).lower()

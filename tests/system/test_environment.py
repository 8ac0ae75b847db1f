"""The environment of shell commands: this interpreter and this workflow, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.lib.system.environment import is_worker, use_this_interpreter

ROOT = Path(__file__).parents[2]


def test_python_in_a_shell_is_this_one_and_finds_the_workflow_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    use_this_interpreter(ROOT)
    code = "import sys, workflow; print(sys.executable, workflow.__file__)"
    shell = subprocess.run(
        f'python -c "{code}"', shell=True, cwd=tmp_path, capture_output=True, text=True
    )
    interpreter, package = shell.stdout.split()
    assert Path(interpreter).parent == Path(sys.executable).parent
    assert Path(package).parent == ROOT / "workflow"


def test_what_was_set_before_stays_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "/other")
    use_this_interpreter(tmp_path)
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert os.environ["PYTHONPATH"] == f"{tmp_path}:/other"


def test_unset_path_of_modules_gets_no_empty_entry(monkeypatch, tmp_path):
    """An empty entry would mean the folder that the user is in."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    use_this_interpreter(tmp_path)
    assert os.environ["PYTHONPATH"] == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"), [((), False), (("RANK",), False), (("RANK", "WORLD_SIZE"), True)]
)
def test_worker_is_known_by_torchruns_environment(monkeypatch, names, expected):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "0")
    assert is_worker() is expected

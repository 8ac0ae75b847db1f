"""The oldest and the newest packages that are supported: an environment of each set, its tests, and
the demo; what was found is written to tests/versions.json.

python -m tests.support.versions --folder FOLDER [--sets oldest newest] [-- OPTIONS OF PYTEST]

All other packages are those of envs/pins.txt. An environment takes several gigabytes, and is kept
in FOLDER. Exits with 1 if a set fails."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.nightly import commit, machine, run_pytest
from tests.support.suite import ROOT

FOUND = ROOT / "tests" / "versions.json"
SETS = {
    "oldest": {
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "peft": "0.21.0",
        "bitsandbytes": "0.50.0",
        "datasets": "5.0.0",
        "numpy": "2.3.5",  # the interpreter of that torch's Triton does not run with 2.4
    },
    "newest": {
        "torch": "2.14.1",
        "transformers": "5.24.0",
        "peft": "0.21.2",
        "bitsandbytes": "0.50.2",
        "datasets": "5.2.0",
    },
}
LEFT_OUT = ("snakemake-executor-plugin-slurm",)  # no test below needs it, and it needs NumPy 2.4
CHOSEN_BY_THEM = ("tokenizers", "huggingface-hub", "fsspec")
REQUIREMENTS = ("driver", "torch", "report", "dev")
# What works on models, and every undocumented name (`undocumented_interfaces`).
TESTS = (
    *("tests/system/test_undocumented_interfaces.py", "tests/model", "tests/kernels"),
    *("tests/quantization", "tests/training", "tests/distributed", "tests/export"),
    *("tests/objectives", "tests/recording"),
)


def installed(folder: Path, versions: dict[str, str]) -> Path:
    """Make the environment of a set, if it is not there; return its Python."""
    python = folder / "bin" / "python"
    done = folder / "installed.json"
    if not done.exists() or json.loads(done.read_text()) != versions:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pins = folder / "pins.txt"
        lines = (ROOT / "envs" / "pins.txt").read_text(encoding="utf-8").splitlines()
        free = {*versions, *CHOSEN_BY_THEM}
        kept = [line for line in lines if line.partition("==")[0].replace("_", "-") not in free]
        kept += [f"{name}=={version}" for name, version in versions.items()]
        pins.write_text("\n".join(kept) + "\n", encoding="utf-8")
        wanted = [line for name in REQUIREMENTS for line in required(f"{name}.txt")]
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(pins), *wanted]
        subprocess.run(command, check=True)
        done.write_text(json.dumps(versions), encoding="utf-8")
    return python


def required(name: str) -> list[str]:
    """Return the packages of a file of envs/ and of those that it names."""
    packages = []
    for line in (ROOT / "envs" / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            packages += required(line.removeprefix("-r "))
        elif line and not line.startswith(("#", "-c", *LEFT_OUT)):
            packages.append(line)
    return packages


def main() -> int:
    """Try the sets one after the other; the file is written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the environments")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="which")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    args, options = parser.parse_args(arguments[:at]), arguments[at + 1 :] or list(TESTS)
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    for name in args.sets:
        python = installed(args.folder.resolve() / name, SETS[name])
        tests = run_pytest(["-m", "not slow", *options], {}, python=python)
        demo = run_demo(python)
        found[name] = {
            "versions": SETS[name],
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "passed": tests["passed"],
            "skipped": tests["skipped"],
            "failures": [*tests["failures"], *([] if demo else ["the demo"])],
        }
        FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(found[name]))
    return 1 if any(found[name]["failures"] for name in args.sets) else 0


def run_demo(python: Path) -> bool:
    """Train, export, evaluate and report the demo in a copy of this commit; return whether it
    ended well."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        command = [str(python), "-m", "snakemake", "--cores", "all", "all"]
        variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **variables}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

"""Write `envs/<kind>.yaml` for conda from `envs/<kind>.txt` and `envs/pins.txt`: one list of
versions for all.

    python envs/render.py

A test fails when the files are not what this script writes.
"""

from pathlib import Path

ENVS = Path(__file__).resolve().parent
KINDS = ("driver", "torch", "report", "gguf")


def _requirements(path: Path) -> list[str]:
    """Return the requirements of a file and of those that it includes (`-r`)."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    own = [line for line in lines if line and not line.startswith(("#", "-"))]
    return [name for other in included for name in _requirements(path.with_name(other))] + own


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def conda_environment(kind: str) -> str:
    """Return the YAML of one environment; raises `KeyError` for a package without a pin."""
    pins = {_normalized(pin.partition("==")[0]): pin for pin in _requirements(ENVS / "pins.txt")}
    packages = [pins[_normalized(name)] for name in _requirements(ENVS / f"{kind}.txt")]
    lines = [
        f"# Written by envs/render.py from {kind}.txt and pins.txt.",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        "  - python=3.12",
        "  - pip",
        "  - pip:",
        *(f"      - {package}" for package in packages),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for kind in KINDS:
        (ENVS / f"{kind}.yaml").write_text(conda_environment(kind), encoding="utf-8")

"""Write `envs/<kind>.yaml` for conda from `envs/<kind>.txt` and `envs/pins.txt`, and
`envs/package.txt` for pip: one list of versions for all.

    python envs/render.py

A test fails when the files are not what this script writes.
"""

from pathlib import Path

ENVS = Path(__file__).resolve().parent
KINDS = ("driver", "torch", "report", "gguf")
OF_PACKAGE = KINDS[:3]


def _requirements(path: Path) -> list[str]:
    """Return the requirements of a file and of those that it includes (`-r`)."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    own = [line for line in lines if line and not line.startswith(("#", "-"))]
    return [name for other in included for name in _requirements(path.with_name(other))] + own


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def _pinned(kind: str) -> list[str]:
    """Return the packages of a kind with their versions; raises `KeyError` for one without."""
    pins = {_normalized(pin.partition("==")[0]): pin for pin in _requirements(ENVS / "pins.txt")}
    return [pins[_normalized(name)] for name in _requirements(ENVS / f"{kind}.txt")]


def package_requirements() -> str:
    """Return what the library needs where pip installs it as a package."""
    packages = sorted({pin for kind in OF_PACKAGE for pin in _pinned(kind)}, key=str.lower)
    return "\n".join(["# Written by envs/render.py.", *packages]) + "\n"


def conda_environment(kind: str) -> str:
    """Return the YAML of one environment."""
    lines = [
        f"# Written by envs/render.py from {kind}.txt and pins.txt.",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        "  - python=3.12",
        "  - pip",
        "  - pip:",
        *(f"      - {package}" for package in _pinned(kind)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for kind in KINDS:
        (ENVS / f"{kind}.yaml").write_text(conda_environment(kind), encoding="utf-8")
    (ENVS / "package.txt").write_text(package_requirements(), encoding="utf-8")

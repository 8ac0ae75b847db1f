"""Environments: one list of versions, from which pip's and conda's are made."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

ENVS = Path(__file__).resolve().parents[2] / "envs"
WRITTEN = ("pins.txt", "package.txt")
REQUIREMENTS = sorted(path for path in ENVS.glob("*.txt") if path.name not in WRITTEN)


def render():
    spec = importlib.util.spec_from_file_location("render", ENVS / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path):
    """Return the requirements of a file, without comments and options."""
    stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in stripped if line and not line.startswith(("#", "-"))]


def normalized(name):
    """Return a package's name as PyPI compares it, without extras."""
    return name.partition("[")[0].lower().replace("_", "-").replace(".", "-")


def pins():
    """Return the pinned version of every package."""
    pairs = (line.split("==") for line in lines(ENVS / "pins.txt"))
    return {normalized(name): version for name, version in pairs}


@pytest.mark.parametrize("kind", render().KINDS)
def test_conda_environment_is_what_the_script_writes(kind):
    written = (ENVS / f"{kind}.yaml").read_text(encoding="utf-8")
    assert written == render().conda_environment(kind), "`python envs/render.py` writes it again"


def test_requirements_of_the_package_are_what_the_script_writes():
    written = (ENVS / "package.txt").read_text(encoding="utf-8")
    assert written == render().package_requirements(), "`python envs/render.py` writes it again"


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_has_one_version(path):
    names = [line.partition("==") for line in lines(path)]
    loose = [name for name, pinned, _ in names if not pinned and normalized(name) not in pins()]
    assert loose == []


@pytest.mark.parametrize(
    "path",
    # vLLM and unsloth have environments of their own
    [
        path
        for path in REQUIREMENTS
        if path.name not in ("flash-attn.txt", "unsloth.txt", "vllm.txt")
    ],
    ids=lambda p: p.name,
)
def test_pip_reads_the_pins_with_every_list(path):
    assert "-c pins.txt" in path.read_text(encoding="utf-8").splitlines()


def test_every_pin_is_one_exact_version_of_a_package_that_is_pinned_once():
    assert len(pins()) == len(lines(ENVS / "pins.txt"))
    assert [p for p in lines(ENVS / "pins.txt") if not re.fullmatch(r"[\w.-]+==[\w.!]+", p)] == []


def test_every_package_that_the_workflow_imports_is_pinned():
    root = ENVS.parent / "workflow"
    sources = [path for x in ("lib/**", "benchmark", "scripts") for path in root.glob(f"{x}/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    imported = re.compile(
        r"^ *(?:from (?=[\w.]+ import )|import (?=[\w.]+(?: as \w+)?$))(\w+)", re.M
    )
    tops = {name for text in texts for name in imported.findall(text)}
    tops -= sys.stdlib_module_names | {"workflow"}
    tops.remove("triton")  # comes with PyTorch for GPUs, in the one version that fits it
    owners = importlib.metadata.packages_distributions()
    # an optional package that is not installed is known by its own name
    names_of = {top: {normalized(owner) for owner in owners.get(top, [top])} for top in tops}
    listed = {normalized(line.partition("==")[0]) for path in REQUIREMENTS for line in lines(path)}
    loose = {top for top, found in names_of.items() if not found & (pins().keys() | listed)}
    assert len(tops) > 10
    assert loose == set()


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_container_installs_the_lists_with_their_pins_and_names_no_version(name):
    text = (ENVS / name).read_text(encoding="utf-8")
    for kind in render().KINDS:
        assert f"-r /opt/workflow/envs/{kind}.txt" in text
    assert "==" not in text
    python = yaml.safe_load((ENVS / "torch.yaml").read_text())["dependencies"][0]
    assert f"python:{python.partition('=')[2]}-slim" in text


def test_stages_run_in_the_image_that_the_definition_builds():
    common = (ENVS.parent / "workflow" / "rules" / "common.smk").read_text(encoding="utf-8")
    assert 'SOURCES / "envs" / "workflow.sif"' in common
    assert (
        "apptainer build envs/workflow.sif envs/apptainer.def"
        in (ENVS / "apptainer.def").read_text()
    )


@pytest.mark.skipif(
    not (Path(sys.prefix) / ".installed").exists(), reason="not the environment of `make install`"
)
def test_installed_versions_are_the_pinned_ones():
    installed = {
        normalized(package.metadata["Name"]): package.version.partition("+")[0]
        for package in importlib.metadata.distributions()
    }
    both = pins().keys() & installed.keys()
    assert {name: installed[name] for name in both} == {name: pins()[name] for name in both}
    assert len(both) > 50


def test_hooks_before_a_commit_are_the_commands_of_make_lint():
    root = ENVS.parent
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = (root / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    commands = recipe.replace("$(BIN)", ".venv/bin").replace("ruff check .", "ruff check")
    assert len(hooks) == 5
    assert [hook["entry"] for hook in hooks if hook["entry"] not in commands] == []

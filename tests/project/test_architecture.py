"""The arrows `Snakefile -> rules -> (shell) scripts -> library`, as far as import-linter does not
see them.

Which package of the library may import which stands in pyproject.toml; `make lint` checks that.
"""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIB = sorted((ROOT / "workflow" / "lib").rglob("*.py"))
PACKAGES = sorted(path.parent for path in LIB if path.name == "__init__.py")
SCRIPTS = sorted((ROOT / "workflow" / "scripts").glob("[a-z]*.py"))
RULES = sorted([*(ROOT / "workflow" / "rules").glob("*.smk"), *ROOT.glob("Snakefile")])
STAGES = [path.stem for path in RULES if path.suffix == ".smk" and path.stem != "common"]

# What rules may import, below workflow.lib: nothing that takes long to import, as every job does.
OPEN_TO_RULES = (
    "artifacts",
    "benchmark.cases",
    "evaluation.task_files",
    "model.architecture.model_files",
    "planning.machine",
    "planning.preflight.cluster_request",
    "planning.preflight.checks",
    "settings",
    "system",
)
# Scripts that are no stage: what all command lines share, the wrapper that leases GPUs, the workers
# of stages, and what writes documents.
NO_STAGES = {
    "command",
    "evaluate_run_worker",
    "finetune_worker",
    "lease_gpus",
    "write_model_descriptions",
    "write_settings_pages",
}
HEAVY = {"transformers", "peft", "bitsandbytes", "accelerate"}


@cache
def imports(path: Path) -> frozenset[str]:
    """Return every module that a file imports anywhere, also inside functions, by its full name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: import by full name"
            assert node.module, f"{path.name}: import by full name"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def library_imports(path: Path) -> set[Path]:
    """Return the files of the library that a file imports directly."""
    names = (name for name in imports(path) if name.startswith("workflow.lib."))
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return {file for file in files if file.exists()}


def library_closure(path: Path) -> set[Path]:
    """Return the files of the library that a file imports directly or through others."""
    reached: set[Path] = set()
    waiting = [path]
    while waiting:
        new = library_imports(waiting.pop()) - reached
        reached |= new
        waiting += new
    return reached


def ids(paths: list[Path]) -> list[str]:
    """Return paths below the checkout as test ids."""
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", LIB, ids=ids(LIB))
def test_library_never_ends_the_process(path: Path) -> None:
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    assert not set(calls) & {"sys.exit", "exit", "quit"}


@pytest.mark.parametrize("package", PACKAGES, ids=ids(PACKAGES))
def test_package_has_a_manual_and_nothing_else_in_its_init(package: Path) -> None:
    """Code there would run with every import of a module of the package."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("package", PACKAGES, ids=ids(PACKAGES))
def test_package_has_at_most_twenty_modules(package: Path) -> None:
    assert len(list(package.glob("[a-z]*.py"))) <= 20


def test_every_package_is_under_a_contract_of_import_linter() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = document["tool"]["importlinter"]["contracts"]
    (order,) = (c["layers"] for c in contracts if "workflow.scripts" in c.get("layers", ()))
    named = {name for layer in order for name in re.findall(r"[\w.]+", layer)}
    rooms = {f"workflow.lib.{p.name}" for p in PACKAGES if p.parent.name == "lib"}
    assert rooms <= named


def test_launcher_of_training_needs_none_of_the_packages_of_its_workers() -> None:
    """They take seconds to import, and the workers wait for the launcher."""
    script = ROOT / "workflow" / "scripts" / "finetune.py"
    files = library_closure(script) | {script}
    loaded = {name.split(".")[0] for file in files for name in imports(file)}
    assert "torch" in loaded  # which is torchrun
    assert not loaded & HEAVY


@pytest.mark.parametrize("path", SCRIPTS, ids=ids(SCRIPTS))
def test_script_leaves_collectives_to_the_library(path: Path) -> None:
    distributed = {name for name in imports(path) if name.startswith("torch.distributed")}
    assert all(name.startswith("torch.distributed.elastic") for name in distributed)


@pytest.mark.parametrize("path", SCRIPTS, ids=ids(SCRIPTS))
def test_script_imports_no_other_stage(path: Path) -> None:
    """What a worker shares with its stage is the command line."""
    own = f"workflow.scripts.{path.stem.removesuffix('_worker')}"
    others = {name for name in imports(path) if name.startswith("workflow.scripts.")}
    assert all(name.startswith(("workflow.scripts.command", own)) for name in others)


@pytest.mark.parametrize("path", RULES, ids=ids(RULES))
def test_rules_import_only_the_open_part_of_the_library(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^\s*import workflow\b", text, re.MULTILINE), "it hides Snakemake's own"
    for module, names in re.findall(r"^from workflow\.lib\.([\w.]+) import (\w+|\()", text, re.M):
        full = f"{module}.{names}."
        assert full.startswith(tuple(f"{name}." for name in OPEN_TO_RULES)), full
    assert text.count("from workflow") == len(re.findall(r"^from workflow\.lib\.", text, re.M))


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_a_script_and_a_test_of_its_name(stage: str) -> None:
    expected = [f"workflow/scripts/{stage}.py", f"tests/stages/test_{stage}.py"]
    assert [name for name in expected if not (ROOT / name).exists()] == []


def test_every_script_is_a_stage() -> None:
    assert {path.stem for path in SCRIPTS} - NO_STAGES == set(STAGES)


def test_rules_are_of_eighteen_stages() -> None:
    """This guards the tests above: a new place of the rules must not leave them without cases."""
    assert len(STAGES) == 18


def test_snakemake_finds_the_default_profile_beside_the_snakefile() -> None:
    """A checkout without symbolic links would lose `rerun-incomplete` and `nolock` in silence."""
    assert (ROOT / "profiles" / "default" / "config.yaml").is_file()

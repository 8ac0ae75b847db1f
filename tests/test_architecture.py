"""The arrows of workflow/docs/design.md: `Snakefile -> rules -> (shell) scripts -> lib`, read from the imports."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIB = sorted((ROOT / "workflow" / "lib").glob("[a-z]*.py"))
SCRIPTS = sorted((ROOT / "workflow" / "scripts").glob("[a-z]*.py"))
RULES = sorted([*(ROOT / "workflow" / "rules").glob("*.smk"), *ROOT.glob("Snakefile")])
DESIGN = (ROOT / "workflow" / "docs" / "design.md").read_text(encoding="utf-8")

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def torch_free() -> list[str]:
    """Return the modules that the design lists as free of torch and that exist."""
    (line,) = re.findall(r"^Without torch: (.*)$", DESIGN, flags=re.MULTILINE)
    return [name for name in re.findall(r"`(\w+)`", line) if module_path(name).exists()]


def open_to_rules() -> set[str]:
    """Return the library modules that the design lets rules import."""
    (names,) = re.findall(r"rules import only ((?:`lib\.\w+`(?:, )?)+)", DESIGN)
    return set(re.findall(r"`lib\.(\w+)`", names))


def stages() -> list[str]:
    """Return the stages of the design's table, in order."""
    table = DESIGN.split("## Stages and artifacts")[1].split("###")[0]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)


def module_path(name: str) -> Path:
    """Return the file of a library module."""
    return ROOT / "workflow" / "lib" / f"{name}.py"


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


def library_imports(path: Path) -> set[str]:
    """Return the library modules that a file imports directly."""
    below = {name.split(".")[2] for name in imports(path) if name.startswith("workflow.lib.")}
    return {name for name in below if module_path(name).exists()}


def library_closure(name: str) -> set[str]:
    """Return the library modules that a module imports directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = library_imports(module_path(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def packages(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def ids(paths: list[Path]) -> list[str]:
    """Return file names as test ids."""
    return [path.name for path in paths]


@pytest.mark.parametrize("path", LIB, ids=ids(LIB))
def test_library_knows_neither_scripts_nor_command_line_nor_snakemake(path: Path) -> None:
    assert not packages(path) & {"argparse", "snakemake"}
    assert not [name for name in imports(path) if name.startswith("workflow.scripts")]


@pytest.mark.parametrize("path", LIB, ids=ids(LIB))
def test_library_never_ends_the_process(path: Path) -> None:
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    assert not set(calls) & {"sys.exit", "exit", "quit"}


def test_library_modules_do_not_import_each_other_in_circles() -> None:
    TopologicalSorter({path.stem: library_imports(path) for path in LIB}).prepare()


def test_modules_without_torch_load_none_of_the_heavy_packages() -> None:
    """In one process, as what all of them together do not load, none loads; the first that does is named."""
    program = (
        "import importlib, sys\n"
        f"for name in {torch_free()}:\n"
        "    importlib.import_module(f'workflow.lib.{name}')\n"
        f"    for heavy in {HEAVY}:\n"
        "        if heavy in sys.modules: sys.exit(f'{name} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_launcher_of_training_needs_none_of_the_packages_of_its_workers() -> None:
    """They take seconds to import, and the workers wait for the launcher."""
    script = ROOT / "workflow" / "scripts" / "finetune.py"
    direct = library_imports(script)
    below = direct.union(*(library_closure(name) for name in direct))
    loaded = set().union(*(packages(path) for path in [script, *map(module_path, below)]))
    assert "torch" in loaded  # which is torchrun
    assert not loaded & set(HEAVY) - {"torch"}


@pytest.mark.parametrize(
    "name", [n for n in ("nf4", "lora", "model", "loss") if module_path(n).exists()]
)
def test_model_code_does_not_know_how_it_is_sharded(name: str) -> None:
    assert "parallel" not in library_closure(name)


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
def test_rules_import_only_the_open_modules_of_the_library(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    ours = [line.strip() for line in lines if re.match(r"\s*(import|from) workflow\b", line)]
    modules = [re.match(r"from workflow\.lib(?:\.| import )(\w+)", line) for line in ours]
    assert all(modules), "a bare `import workflow` would hide Snakemake's own `workflow`"
    assert {module[1] for module in modules if module} <= open_to_rules()


@pytest.mark.skipif(len(RULES) == 0, reason="there are no rules yet")
@pytest.mark.parametrize("stage", stages())
def test_stage_has_rule_script_and_test_of_its_name(stage: str) -> None:
    expected = [
        f"workflow/rules/{stage}.smk",
        f"workflow/scripts/{stage}.py",
        f"tests/test_{stage}.py",
    ]
    assert [name for name in expected if not (ROOT / name).exists()] == []


def test_every_script_is_a_stage_of_the_design() -> None:
    assert {path.stem for path in SCRIPTS} - {"command", "lease_gpus", "finetune_worker"} <= set(
        stages()
    )


def test_design_names_twelve_stages() -> None:
    """Guards the tests above, which read the design's tables: a new layout must not empty them."""
    assert len(stages()) == 12
    assert len(torch_free()) >= 7
    assert open_to_rules() >= {"config", "runs"}


def test_snakemake_finds_the_default_profile_beside_the_snakefile() -> None:
    """A checkout without symbolic links would lose `rerun-incomplete` and `nolock` in silence."""
    assert (ROOT / "profiles" / "default" / "config.yaml").is_file()

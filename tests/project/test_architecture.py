"""The arrows `Snakefile -> rules -> (shell) scripts -> library`, as far as import-linter does not
see them.

Which package of the library may import which stands in pyproject.toml; `make lint` checks that."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIB = sorted((ROOT / "workflow" / "lib").rglob("*.py"))
PACKAGES = sorted(path.parent for path in LIB if path.name == "__init__.py")
SCRIPTS = sorted((ROOT / "workflow" / "scripts").glob("[a-z]*.py"))
RULES = sorted([*(ROOT / "workflow" / "rules").glob("*.smk"), *ROOT.glob("*/Snakefile")])
FUNCTIONS = ("common", "inputs")  # files without rules
STAGES = [path.stem for path in RULES if path.suffix == ".smk" and path.stem not in FUNCTIONS]

# What rules may import, below workflow.lib: nothing that takes long to import, as every job does.
OPEN_TO_RULES = (
    "artifacts",
    "evaluation.task_files",
    "checkpoints.files.model_files",
    "planning.machine",
    "planning.preflight.cluster_request",
    "planning.preflight.checks",
    "settings",
    "system",
    "recording.recording_process.plan_recorder",
)
WITHIN_FUNCTIONS = ("model.describe_model.describe_file",)  # of a dry run alone
HEAVY = {"transformers", "peft", "bitsandbytes", "accelerate"}


@cache
def imports(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: import by full name"
            assert node.module, f"{path.name}: import by full name"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def library_imports(path):
    names = (name for name in imports(path) if name.startswith("workflow.lib."))
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return {file for file in files if file.exists()}


def library_closure(path):
    """Return the files of the library that a file imports directly or through others."""
    reached = set()
    waiting = [path]
    while waiting:
        new = library_imports(waiting.pop()) - reached
        reached |= new
        waiting += new
    return reached


def test_package_has_a_manual_and_nothing_else_in_its_init_and_at_most_twenty_modules():
    """Code there would run with every import of a module of the package."""
    wrong = []
    for package in PACKAGES:
        tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
        modules = len(list(package.glob("[a-z]*.py")))
        if not ast.get_docstring(tree) or len(tree.body) != 1 or modules > 20:
            wrong.append((package.name, modules))
    assert wrong == []


def test_every_package_is_under_a_contract_of_import_linter():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = document["tool"]["importlinter"]["contracts"]
    (order,) = (c["layers"] for c in contracts if "workflow.scripts" in c.get("layers", ()))
    named = {name for layer in order for name in re.findall(r"[\w.]+", layer)}
    rooms = {f"workflow.lib.{p.name}" for p in PACKAGES if p.parent.name == "lib"}
    assert rooms <= named


def test_launcher_of_training_needs_none_of_the_packages_of_its_workers():
    """They take seconds to import, and the workers wait for the launcher."""
    script = ROOT / "workflow" / "scripts" / "finetune.py"
    files = library_closure(script) | {script}
    loaded = {name.split(".")[0] for file in files for name in imports(file)}
    assert "torch" in loaded  # which is torchrun
    assert not loaded & HEAVY


def test_scripts_leave_collectives_to_the_library_and_import_no_other_stage():
    """What a worker shares with its stage is the command line."""
    allowed = ("torch.distributed.elastic", "workflow.scripts.command")
    wrong = {
        path.name: name
        for path in SCRIPTS
        for name in imports(path)
        if name.startswith(("torch.distributed", "workflow.scripts."))
        and not name.startswith((*allowed, f"workflow.scripts.{path.stem.removesuffix('_worker')}"))
    }
    assert wrong == {}


def test_rules_import_only_the_open_part_of_the_library():
    for path in RULES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*import workflow\b", text, re.MULTILINE), "hides Snakemake's own"
        found = re.findall(r"^( *)from workflow\.lib\.([\w.]+) import (\w+|\()", text, re.M)
        for indent, module, names in found:
            full, allowed = f"{module}.{names}.", WITHIN_FUNCTIONS if indent else OPEN_TO_RULES
            assert full.startswith(tuple(f"{name}." for name in allowed)), full
        assert text.count("from workflow") == len(found)


def test_every_stage_has_a_script_and_a_test_of_its_name():
    expected = [
        f"{folder}{s}.py" for s in STAGES for folder in ("workflow/scripts/", "tests/stages/test_")
    ]
    assert [name for name in expected if not (ROOT / name).exists()] == []


def test_snakemake_finds_the_default_profile_beside_the_snakefile():
    """A checkout without symbolic links would lose `rerun-incomplete` and `nolock` in silence."""
    assert (ROOT / "profiles" / "default" / "config.yaml").is_file()

"""Figures of the library's structure, which `workflow/docs/architecture.md` bounds.

`python -m tests.support.house` shows them, which names say nothing, and which modules know each
memory option."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from workflow.lib.step_plan.memory_options import TABLE

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "workflow" / "lib"
# What they call `saved_activations` is a term of the peak.
TERMS = ("planning.memory.peaks", "recording.term_names")
PAGE = ROOT / "workflow" / "docs" / "architecture.md"
# Names that hold no noun of what they bind: roles in a sentence. `of_` begins one more kind.
EMPTY_NAMES = {
    *("found", "given", "known", "place", "places", "asked", "said", "lack", "lacks", "told"),
    *("rest", "some", "ours", "theirs", "here", "there", "whose", "which", "those"),
    *("stuff", "thing"),
}
# Functions that ask a folder what `Checkpoint` and `Adapter` know.
ON_DISK = {
    "places that read a config": "read_bounded read_config named_weights without_quantization "
    "quantization_of said_of_quantization read_adapter_config AutoConfig.from_pretrained",
    "places that build a model without values": "build_config_on_meta",
    "places that open a reader": "CheckpointReader DecodedReader ConvertedReader AdapterReader",
    "places that make names": "ModuleNames StackNames",
}


@cache
def modules() -> dict[str, str]:
    files = sorted(LIBRARY.rglob("*.py"))
    return {_name(file): file.read_text(encoding="utf-8") for file in files}


def _name(file: Path) -> str:
    return ".".join(file.relative_to(LIBRARY).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return each node of the syntax of each file of `workflow/`."""
    files = sorted((ROOT / "workflow").rglob("*.py"))
    trees = [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    return [(file, node) for file, tree in trees for node in ast.walk(tree)]


def knowing(option: str) -> list[str]:
    """Return the modules that name a memory option."""
    word = re.compile(rf"\b{option}\b")
    return [name for name, text in modules().items() if word.search(text) and name not in TERMS]


def importers() -> Counter[str]:
    """Return how many modules and scripts import each module of the library."""
    pairs = {(file, name) for file, node in nodes() for name in _imported(node)}
    return Counter(name for _, name in pairs)


def _imported(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("workflow.lib."):
        return set()
    module = str(node.module).removeprefix("workflow.lib.")
    inner = {f"{module}.{alias.name}" for alias in node.names} & modules().keys()
    return inner or {module}


@cache
def called() -> list[tuple[str, str]]:
    """Return `file:line` and function of each call in `workflow/`, but in the room whose objects
    hold what a folder says."""
    room = f"{LIBRARY / 'checkpoints'}/"
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func))
        for file, node in nodes()
        if isinstance(node, ast.Call) and not str(file).startswith(room)
    ]


def outside_of_checkpoints(functions: str) -> list[str]:
    """Return `file:line` of each call of these functions outside of that room."""
    return [line for line, name in called() if name in functions.split()]


def empty_names() -> list[str]:
    """Return `file:line name` of each parameter, variable, function and class of `workflow/` whose
    name says nothing."""
    return [
        f"{file.relative_to(ROOT)}:{node.lineno} {name}"
        for file, node in nodes()
        if (name := _bound_name(node)) and _is_empty(name.lower().strip("_"))
    ]


def _is_empty(name: str) -> bool:
    return name in EMPTY_NAMES or name.startswith("of_")


def _bound_name(node: ast.AST) -> str:
    match node:
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return ""


def figures() -> dict[str, int]:
    counts = importers()
    lines = {name: text.count("\n") for name, text in modules().items()}
    packages = Counter[str]()
    for name, count in lines.items():
        packages[name.partition(".")[0]] += count
    whole = sum(lines.values())
    return {
        "modules that know a memory option": max(len(knowing(x.field)) for x in TABLE),
        "modules with exactly one importer": sum(counts[name] == 1 for name in modules()),
        "share of the largest package, percent": round(100 * max(packages.values()) / whole),
        "lines of the library": whole,
        "names that say nothing": len(empty_names()),
        **{what: len(outside_of_checkpoints(calls)) for what, calls in ON_DISK.items()},
        "lambdas in rules": sum(text.count("lambda") for text in rules()),
    }


def rules() -> list[str]:
    """Return the Snakefile and the files of rules."""
    folder = ROOT / "workflow"
    files = [folder / "Snakefile", *(folder / "rules").glob("*.smk")]
    return [file.read_text(encoding="utf-8") for file in files]


def bounds() -> dict[str, int]:
    rows = re.findall(r"^\| ([a-z ,]+) \| at most ([\d,]+) \|", PAGE.read_text("utf-8"), re.M)
    return {name: int(bound.replace(",", "")) for name, bound in rows}


if __name__ == "__main__":
    print("\n".join(empty_names()))
    for calls in ON_DISK.values():
        print("\n".join(outside_of_checkpoints(calls)))
    for figure, value in figures().items():
        print(f"{figure}: {value:,}")
    for option in TABLE:
        print(f"{option.field}: {', '.join(knowing(option.field))}")

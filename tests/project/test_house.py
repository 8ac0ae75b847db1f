"""The library stays within the figures of `workflow/docs/architecture.md`; a name is bound once."""

import ast
from collections import Counter
from pathlib import Path

from tests.support.house import bounds, figures

PROJECT = Path(__file__).parents[2]


def test_library_is_within_the_figures_of_the_page():
    counted, allowed = figures(), bounds()
    assert counted.keys() == allowed.keys()
    assert {name: count for name, count in counted.items() if count > allowed[name]} == {}


def bound_names(module):
    """Yield the names that a module's own lines bind, but in its conditions."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (x for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))
            yield from (x.id for x in names if isinstance(x.ctx, ast.Store))


def test_no_module_binds_a_name_twice():
    """A constant that is bound again changes what functions before it read: tiles of a kernel had
    the size of another's so, and took four times as long."""
    twice = {
        f"{path.relative_to(PROJECT)}: {name}"
        for folder in ("workflow", "tests")
        for path in (PROJECT / folder).rglob("*.py")
        for name, count in Counter(bound_names(ast.parse(path.read_text("utf-8")))).items()
        if count > 1
    }
    assert twice == set()

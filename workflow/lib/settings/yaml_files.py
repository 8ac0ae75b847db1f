"""YAML files of users, composed to nodes: nothing is constructed, and aliases cannot blow up.

Nine levels of nine aliases are a file of a hundred bytes and a document of 400 million values. A
reader that walks it, or copies it, never ends. So what a document would be without aliases is
counted before anything walks it."""

from pathlib import Path

import yaml

from workflow.lib.system.input_files import read_input

MOST_NODES = 200_000  # a task file with thousands of examples written out has some 10,000


class AliasError(yaml.YAMLError):
    """Aliases of a document hold one another, or stand for more values than any file needs."""


def compose_yaml(path: Path) -> yaml.Node | None:
    """Return the root node of a file's one document, None for an empty one. Raises
    `yaml.YAMLError`, `UserError` of `read_input`, or `RecursionError`."""
    root: yaml.Node | None = yaml.compose(read_input(path), Loader=yaml.SafeLoader)
    check_aliases(root)
    return root


def check_aliases(root: yaml.Node | None) -> None:
    """Raise `AliasError` for more than `MOST_NODES` nodes without aliases, or for an anchor within
    itself."""
    if root is not None and _count(root, {}, set()) > MOST_NODES:
        raise AliasError(f"its aliases stand for more than {MOST_NODES:,} values")


def _count(node: yaml.Node, counted: dict[int, int], open_nodes: set[int]) -> int:
    """Return how many nodes a node is, aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in open_nodes:
        raise AliasError(f"line {node.start_mark.line + 1}: an anchor holds itself")
    if id(node) not in counted:
        open_nodes.add(id(node))
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(n,) for n in node.value]
        counted[id(node)] = 1 + sum(_count(n, counted, open_nodes) for pair in pairs for n in pair)
        open_nodes.remove(id(node))
    return counted[id(node)]

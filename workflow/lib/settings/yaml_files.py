"""YAML files of users, composed to nodes: nothing is constructed, and aliases cannot blow up.

Nine levels of nine aliases are a file of a hundred bytes and a document of 400 million values. A
reader that walks it, or copies it, never ends. So the size of the document without aliases is
counted before any walk.

Settings of the command line (`--config data='{heldout: null}'`) are typed as in a file: Snakemake
reads every value in a section there as text (YAML's BaseLoader), and passes it to its jobs in the
same way."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input

MOST_NODES = 200_000  # a task file with thousands of examples written out has some 10,000
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class AliasError(yaml.YAMLError):
    """Aliases of a document contain one another, or expand to more values than any file needs."""


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
    """Return the number of a node's nodes, aliases expanded."""
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


def check_yaml(path: Path) -> None:
    """Raise `UserError`, with the line, for a file of settings that is no YAML, has a key twice, or
    a number that YAML reads as another one.

    YAML's own loaders silently take the second of two equal keys, and 010 as 8."""
    try:
        loader = yaml.SafeLoader(_text(path))
        root = loader.get_single_node()
        check_aliases(root)
        _check_nodes(root, path)
        if root is not None:
            loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(
            f"{location}: {error.problem or error.context}: this is no YAML. Correct that line or "
            "the one before it; indent with spaces, not with tabs."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: it cannot be read as YAML ({error}). Correct the file.") from None


def _text(path: Path) -> str:
    text = read_input(path)
    with suppress(ValueError):
        json.loads(text)
        return text.replace("\t", " ")  # JSON, but for tabs, is YAML
    return text


def _check_nodes(root: yaml.Node | None, path: Path) -> None:
    """Raise `UserError` for a repeated key in a section, or a number that is misread."""
    pending, checked = [(root, "")], set[int]()
    while pending:
        node, prefix = pending.pop()
        if id(node) in checked:  # an alias, or an anchor that holds itself
            continue
        checked.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += [(entry, prefix) for entry in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS:
            value = yaml.SafeLoader("").construct_document(node)
            if (finding := misread_number(node.value, value)) is not None:
                raise UserError(
                    f"{path}, line {_line(node)}: {finding}, or put it in quotes if it is text."
                )
        if isinstance(node, yaml.MappingNode):
            firsts: dict[str, yaml.Node] = {}
            for key, value in node.value:
                name = f"{prefix}{key.value}"
                first = firsts.setdefault(name, key)
                if first is not key:
                    raise UserError(
                        f"{path}, line {_line(key)}: the key {name} stands there for the second "
                        f"time, and would replace the first in line {_line(first)}. Join the two, "
                        "or remove one."
                    )
                pending.append((value, f"{name}."))


def misread_number(text: str, value: object) -> str | None:
    """Return the fault of a plain text that YAML reads as another number than it looks like: `010`
    as 8 (base 8), `1:30` as 90 (base 60)."""
    digits = text.lstrip("+-").replace("_", "")
    is_other = isinstance(value, int | float) and (
        ":" in digits or (digits.isdecimal() and len(digits) > 1 and digits[0] == "0")
    )
    if not is_other:
        return None
    return f"YAML reads {text} as {value}. Write {value}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


# Each with its other spellings; of a repeated option Snakemake takes only the last.
LISTS = (("--config", "-C"), ("--configfile", "--configfiles"))


def check_options(words: Sequence[str]) -> None:
    """Raise `UserError` for settings before a repeated option, which Snakemake silently drops."""
    for names in LISTS:
        options = [word.partition("=")[0] for word in words if word.partition("=")[0] in names]
        if len(options) > 1:
            raise UserError(
                f"{names[0]} stands {len(options)} times in the command, and Snakemake would take "
                f"the last one alone. Give all behind one: {names[0]} A B"
            )


def is_dry_run(words: Sequence[str]) -> bool:
    """Whether a command plans jobs and runs none: `-n`, also among other letters (`-np`)."""
    return any(re.fullmatch(r"--dry-?run|-[a-zA-Z]*n[a-zA-Z]*", word) for word in words)


def as_in_yaml(value: object) -> object:
    """Return a value whose texts are typed as in a YAML file: null, true, false and numbers.

    Raises `UserError` for a text that YAML reads as another number than it looks like."""
    if isinstance(value, Mapping):
        return {key: as_in_yaml(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_in_yaml(item) for item in value]
    return _scalar(value) if isinstance(value, str) else value


def _scalar(text: str) -> object:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if (finding := misread_number(text, value)) is not None:
        raise UserError(f"--config: {finding}, or, if it is text, in quotes in a file of settings.")
    is_typed = isinstance(value, bool | int | float) or (value is None and text.strip())
    return value if is_typed else text

"""The raw corpus: docstrings, language reference and source code, nothing held out.

Three things keep a held-out answer from the base model: the documentation of held-out objects is
left out; source code comes without any docstring and without the held-out functions and classes;
and a block of any document that holds a share of a held-out answer goes.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from .harvest import DocumentedObject
from .near_duplicates import MIN_CONTAINED_WORDS, ShingleIndex, normalised, shingles
from .splits import Split
from .topics import Section

MAX_DOCUMENT_CHARS = 4000  # longer documents are divided, at blank lines
MAX_BLOCK_CHARS = 6000  # a longer block without a blank line is a table, and goes


@dataclass(frozen=True)
class Corpus:
    """Plain documents, and how many blocks left because they repeat a held-out answer."""

    documents: list[str]
    removed_blocks: int


def build_corpus(
    objects: Sequence[DocumentedObject],
    sections: Sequence[Section],
    modules: Iterable[tuple[str, ModuleType]],
    split: Split,
) -> Corpus:
    """Return the corpus that excludes the held-out objects and their answers."""
    held_out = split.heldout_sources
    held_out_definitions = frozenset(o.definition for o in objects if o.name in held_out)
    raw = [
        *_docstring_documents(objects, held_out),
        *(f"{s.title}\n\n{s.text}" for s in sections if s.source not in held_out),
        *_source_documents(modules, held_out_definitions),
    ]
    index = ShingleIndex(protected_texts(split))
    documents: dict[str, None] = {}
    removed_blocks = 0
    for document in raw:
        blocks = [b for b in re.split(r"\n\s*\n", document) if len(b) <= MAX_BLOCK_CHARS]
        free_blocks = _without_contained(blocks, index)
        removed_blocks += len(blocks) - len(free_blocks)
        if len(free_blocks) > 1:  # one block is a bare heading
            documents.update(dict.fromkeys(_divide(free_blocks)))
    return Corpus([d for d in documents if d.strip()], removed_blocks)


def protected_texts(split: Split) -> list[str]:
    """Return the held-out answers and descriptions, which must not be in the corpus.

    Bare names may be there.
    """
    texts = {text for pair in split.heldout for text in (pair.completion, pair.description)}
    return sorted(t for t in texts if len(normalised(t).split()) >= MIN_CONTAINED_WORDS)


def _without_contained(blocks: list[str], index: ShingleIndex) -> list[str]:
    """Return the blocks without those that share words with a text that the document largely holds.

    Where the shared words cross blocks, that may not suffice: then nothing is left.
    """
    contained = index.contained_in("\n\n".join(blocks))
    if not contained:
        return blocks
    free_blocks = [block for block in blocks if shingles(block).isdisjoint(contained)]
    return [] if index.contained_in("\n\n".join(free_blocks)) else free_blocks


def _docstring_documents(
    objects: Iterable[DocumentedObject], held_out: frozenset[str]
) -> Iterator[str]:
    for item in objects:
        if item.name not in held_out:
            yield f"{item.kind} {item.name}{item.parameters}\n\n{item.doc}"


def _source_documents(
    modules: Iterable[tuple[str, ModuleType]], held_out: frozenset[str]
) -> Iterator[str]:
    for name, module in modules:
        try:
            source = inspect.getsource(module)
        except (OSError, TypeError):  # built in, or an extension: no source
            continue
        prefix = "" if name == "builtins" else f"{name}."
        yield _bare_source(source, prefix, held_out)


def _bare_source(source: str, prefix: str, held_out: frozenset[str]) -> str:
    """Return Python source without docstrings and without the definitions that are held out."""
    dropped: set[int] = set()
    for node, name in _definitions(ast.parse(source), prefix):
        if name in held_out and not isinstance(node, ast.Module):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            dropped.update(range(first, node.end_lineno + 1))
        elif (docstring := _docstring_node(node)) is not None:
            dropped.update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = source.split("\n")
    return "\n".join(line for i, line in enumerate(lines, start=1) if i not in dropped)


def _definitions(tree: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield a module and every function and class in it, each with its qualified name."""
    if isinstance(tree, ast.Module):
        yield tree, name
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, f"{name}{node.name}"
            yield from _definitions(node, f"{name}{node.name}.")
        else:
            yield from _definitions(node, name)


def _docstring_node(node: ast.AST) -> ast.Expr | None:
    body = node.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return body[0] if isinstance(body[0].value.value, str) else None
    return None


def _divide(blocks: Iterable[str]) -> Iterator[str]:
    """Join blocks to documents of at most `MAX_DOCUMENT_CHARS`, unless one block is longer."""
    part: list[str] = []
    size = 0
    for block in blocks:
        if part and size + len(block) > MAX_DOCUMENT_CHARS:
            yield "\n\n".join(part)
            part, size = [], 0
        part.append(block)
        size += len(block) + 2
    if part:
        yield "\n\n".join(part)

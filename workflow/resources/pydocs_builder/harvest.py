"""Documented objects of the standard library, each once and under its best public name.

Everything is found by import and introspection, so the result belongs to one Python version and
one operating system. It does not read source files and keeps no value that varies between
machines (addresses, paths).
"""

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

SKIPPED_MODULES = {
    *("antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo"),  # act, open windows
    *("posix", "posixpath", "ntpath", "genericpath", "nturl2path", "nt"),  # see `os`, `os.path`
    *("distutils", "lib2to3", "ensurepip"),  # replaced by setuptools where installed; or removed
    *("msilib", "msvcrt", "winreg", "winsound", "nis", "ossaudiodev"),  # one system only
    "pydoc_data",  # data, read by `topics`
}
SKIPPED_SUBMODULES = re.compile(r"(^|\.)(_|tests?(\.|$)|encodings\.|xml\.etree\.cElementTree)")
MAX_SIGNATURE_CHARS = 200
MACHINE_DEPENDENT = re.compile(
    r"0x[0-9a-fA-F]{4,}|['\"](/|[A-Za-z]:\\)\w|frozenset\(|\{'|\bscheme='"  # `sysconfig`'s scheme
)
SAYS_NOTHING = re.compile(r"\((self, )?(/, )?\*args(, \*\*\w+)?\)$")


@dataclass(frozen=True)
class DocumentedObject:
    """One object with its documentation.

    `name` is qualified and drops the prefix `builtins.`; `kind` is module, class, exception,
    function, method or attribute; `parameters` is "(a, b=1)" or "" if unknown; `doc` is the
    dedented docstring; `definition` is the qualified name where the source defines it.
    """

    name: str
    kind: str
    parameters: str
    doc: str
    definition: str

    @property
    def short_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def is_public(self) -> bool:
        """Whether a reader may use the object by this name.

        No part of it is private or special, save `__init__`.
        """
        parts = self.name.split(".")
        return not any(p.startswith("_") and p not in ("__init__", "__future__") for p in parts)


def import_modules() -> tuple[list[tuple[str, ModuleType]], list[str]]:
    """Import the documented modules; return (name, module) pairs, and names that are missing."""
    modules, missing = [], []
    for name in _module_names():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                modules.append((name, importlib.import_module(name)))
            except ImportError:
                missing.append(name)
    return modules, missing


def _module_names() -> Iterator[str]:
    for top in sorted(sys.stdlib_module_names):
        if top in SKIPPED_MODULES or SKIPPED_SUBMODULES.search(top):
            continue
        yield top
        yield from _submodule_names(top)
    yield "os.path"


def _submodule_names(package: str) -> Iterator[str]:
    """Yield the names below a package, found without importing more than the packages."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search_path = getattr(importlib.import_module(package), "__path__", None)
    except ImportError:
        return
    if search_path is None:
        return
    for info in sorted(pkgutil.iter_modules(search_path, f"{package}."), key=lambda i: i.name):
        if not SKIPPED_SUBMODULES.search(info.name) and "windows" not in info.name:
            yield info.name
            if info.ispkg:
                yield from _submodule_names(info.name)


def harvest_objects(modules: Iterable[tuple[str, ModuleType]]) -> list[DocumentedObject]:
    """Return every documented object sorted by name, one per distinct docstring.

    Aliases, re-exports and inherited docstrings share their text; the best name stays: public
    before private, listed in `__all__`, fewest parts, in the module that defines it, shortest.
    """
    best: dict[str, tuple[tuple[Any, ...], DocumentedObject]] = {}
    for name, module in modules:
        for (unlisted, foreign), item in _objects_of_module(name, module):
            key = " ".join(item.doc.split())
            num_parts = item.name.count(".")
            rank = (not item.is_public, unlisted, num_parts, foreign, len(item.name), item.name)
            if key not in best or rank < best[key][0]:
                best[key] = (rank, item)
    return sorted((item for _, item in best.values()), key=lambda item: item.name)


def _objects_of_module(
    name: str, module: ModuleType
) -> Iterator[tuple[tuple[bool, bool], DocumentedObject]]:
    prefix = "" if name == "builtins" else f"{name}."
    exported = getattr(module, "__all__", ())
    if doc := _doc_of(module):
        yield (False, False), DocumentedObject(name, "module", "", doc, name)
    for key, value in list(vars(module).items()):  # inspection may import and so add names
        if not callable(value) or not _belongs_to(value, name):
            continue
        owner = getattr(value, "__module__", None) or name
        rank = (key not in exported, owner.lstrip("_") != name)
        for item in _object_and_members(f"{prefix}{key}", value):
            yield rank, item


def _belongs_to(value: Any, module_name: str) -> bool:
    """Whether a module documents an object as its own rather than having imported it for use."""
    owner = getattr(value, "__module__", None)
    if not isinstance(owner, str):
        return True
    if module_name in ("os", "os.path") and owner in ("posix", "posixpath", "genericpath"):
        return True
    top = owner.split(".")[0]
    if top in ("__main__", "_sitebuiltins"):  # the latter only where `site` ran
        return False
    return top.startswith("_") or top == module_name.split(".")[0]


def _object_and_members(name: str, value: Any) -> Iterator[DocumentedObject]:
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    definition = f"{module}.{qualified}" if module and qualified else name
    if doc := _doc_of(value):
        yield DocumentedObject(name, _kind_of(value), _parameters_of(value), doc, definition)
    if not inspect.isclass(value):
        return
    for key, raw in list(vars(value).items()):
        member = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        if inspect.isclass(member) or not (callable(member) or inspect.isdatadescriptor(member)):
            continue
        if doc := _doc_of(member):
            is_method = callable(member)
            parameters = _without_self(_parameters_of(getattr(value, key))) if is_method else ""
            kind = "method" if is_method else "attribute"
            yield DocumentedObject(f"{name}.{key}", kind, parameters, doc, f"{definition}.{key}")


def _doc_of(value: Any) -> str:
    """Return the object's own docstring, dedented, or "" if it has none."""
    try:
        doc = value.__doc__
    except Exception:  # descriptors may run any code
        return ""
    return inspect.cleandoc(doc).strip() if isinstance(doc, str) else ""


def _kind_of(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function"


def _parameters_of(value: Any) -> str:
    """Return the parameter list as in source.

    It is "" where it is unknown, very long or tied to this machine.
    """
    try:
        text = str(inspect.signature(value))
    except Exception:  # no signature, or one that cannot be evaluated
        return ""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"<(?:function|built-in function) ([\w.]+)(?: at 0x\w+)?>", r"\1", text)
    text = re.sub(r"<(\w+(?:\.\w+)+): [^<>]*>", r"\1", text)  # members of enumerations
    if MACHINE_DEPENDENT.search(text) or "<" in text or len(text) > MAX_SIGNATURE_CHARS:
        return ""
    if SAYS_NOTHING.match(text):
        return ""
    return text


def _without_self(parameters: str) -> str:
    return re.sub(r"^\((?:self|cls)(?:, /)?(?:, )?", "(", parameters)

"""Python scripts of unsloth, TRL and Transformers: their literals. They are never run.

Read are the arguments of calls that set up a training, and assignments to attributes
(`args.learning_rate = 1e-5`). Each other call of these packages becomes a key of its own (`map()`),
so that it has an outcome."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workflow.lib.system.errors import UserError, setting_error

PACKAGES = {
    "accelerate", "bitsandbytes", "datasets", "peft", "transformers", "trl", "unsloth",
    "unsloth_zoo",
}  # fmt: skip
MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel", "AutoModelForCausalLM")
OF_DATASET = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
TRAINER = re.compile(r"(?:Unsloth)?(?!Patch)(\w*?)Trainer")
ARGUMENTS = re.compile(
    r"(?:Unsloth)?(?:(?:Seq2Seq)?TrainingArguments|(?:[A-Z]{3,}|Reward|NashMD)Config)"
)
# Other calls whose keyword arguments are keys.
BY_NAME: dict[str, dict[str, Any]] = {
    "BitsAndBytesConfig": {},
    "get_chat_template": {},
    "EarlyStoppingCallback": {},
    "train_on_responses_only": {"train_on_responses_only": True},
    "DataCollatorForCompletionOnlyLM": {"train_on_responses_only": True},
    "get_peft_model": {"adapter": "lora"},
    "LoraConfig": {"adapter": "lora"},
}
SHOWN_CHARS = 80
VARIABLES = {"os.environ['WANDB_PROJECT']": "wandb_project"}


class Computed(NamedTuple):
    """An argument that a script computes, or a call that is not read, as its source."""

    text: str


def imports_unsloth(text: str) -> bool:
    return re.search(r"^\s*(from|import) unsloth\b", text, re.M) is not None


def read_script(file: Path, text: str, *, called: Iterable[str]) -> dict[str, Any]:
    """Return the keys of a script, those of the training's arguments first. Raises `UserError` if
    it is no Python, sets up no training, or contradicts itself.

    called: methods whose calls become keys, as `map()`."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, RecursionError) as error:
        raise UserError(f"{file}: it is no Python ({error}). Correct it.") from None
    script = _Script(nodes)
    values, seen, of_training = dict[str, Any](), set[str](), set[str]()
    for call in script.calls:
        kind, arguments = script.read(call)
        if not kind:
            key = _key(call)
            if key in called or _root(call.func) in script.imported:
                values.setdefault(key, _computed(call))
            continue
        said = {key: script.literal(node) for key, node in arguments.items()}
        if kind in seen:  # new keys in it are not read
            if not said.items() <= values.items():
                values.setdefault(f"a further {kind}", _computed(call))
            continue
        if kind != "adapter" or call.keywords:  # get_peft_model(model, LoraConfig(r=8))
            seen.add(kind)
        of_training |= said.keys() if kind in ("Trainer", "arguments") else set()
        for key, value in said.items():
            if values.setdefault(key, value) != value and not isinstance(value, Computed):
                name, bound = f"{file}, line {call.lineno}: {key}", f"it was {values[key]!r} before"
                raise setting_error(name, value, bound, "Give both calls one value")
    if not seen:
        raise UserError(f"{file}: no call in it sets up a training. Name another file.")
    values |= {key: script.literal(node) for key, node in script.assigned_attributes()}
    if values.get("tokenizer_name") == values.get("model_name"):
        values.pop("tokenizer_name", None)
    return {key: values[key] for key in sorted(values, key=lambda key: key not in of_training)}


class _Script:
    """The calls and assignments of a script."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.calls = sorted(calls, key=lambda call: (call.lineno, call.col_offset))
        self._assigned = list(_assignments(nodes))
        of_name = defaultdict[str, list[ast.expr]](list)
        for target, value in self._assigned:
            of_name[ast.unparse(target)].append(value)
        # A name with several values counts as none of them.
        self._names = {name: values[0] for name, values in of_name.items() if len(values) == 1}
        self.imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] in PACKAGES
        }

    def read(self, call: ast.Call) -> tuple[str, Mapping[str, Any]]:
        """Return the kind of a call, "" for one that is not read, and its arguments."""
        name, owner = _name(call.func), _name(getattr(call.func, "value", None))
        words = dict(self._keywords(call))
        if name == "load_dataset":
            words = {OF_DATASET.get(key, key): value for key, value in words.items()}
            return name, dict(zip(OF_DATASET.values(), call.args, strict=False)) | words
        if name == "from_pretrained" and owner in MODELS:
            first: dict[str, Any] = {"model_name": call.args[0]} if call.args else {}
            if "pretrained_model_name_or_path" in words:
                first["model_name"] = words.pop("pretrained_model_name_or_path")
            return name, first | ({owner: True} if owner == "FastVisionModel" else {}) | words
        if name == "from_pretrained" and owner == "AutoTokenizer" and call.args:
            return owner, {"tokenizer_name": call.args[0]}
        if name == "set_seed" and call.args:
            return name, {"seed": call.args[0]}
        if name == "train_test_split":
            return name, {key: words[key] for key in words if key == "test_size"}
        if name in BY_NAME:
            kind = "adapter" if BY_NAME[name].get("adapter") else name
            return kind, BY_NAME[name] | words
        if match := TRAINER.fullmatch(name):
            return "Trainer", {"objective": match[1].lower() or "sft"} | words
        return ("arguments", words) if ARGUMENTS.fullmatch(name) else ("", {})

    def literal(self, node: Any) -> Any:
        if not isinstance(node, ast.expr):
            return node
        try:
            return ast.literal_eval(self._names.get(ast.unparse(node), node))
        except (ValueError, TypeError, SyntaxError, RecursionError):
            return Computed(ast.unparse(node))

    def assigned_attributes(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield assignments to attributes of anything but `self` and modules, by name."""
        for target, value in self._assigned:
            if ast.unparse(target) in VARIABLES:
                yield VARIABLES[ast.unparse(target)], value
            elif isinstance(target, ast.Attribute) and _root(target) not in ("self", "torch", "os"):
                yield target.attr, value

    def _keywords(self, call: ast.Call) -> Iterator[tuple[str, Any]]:
        for word in call.keywords:
            if word.arg is not None:
                yield word.arg, word.value
                continue
            given = self.literal(word.value)  # **given
            if isinstance(given, dict):
                yield from given.items()
            else:
                yield f"**{ast.unparse(word.value)}", word.value


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield node.target, node.value


def _name(node: ast.expr | None) -> str:
    """Return the last word of a name: `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _root(node: ast.AST) -> str:
    """Return the first word of a name: `a` of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def _key(call: ast.Call) -> str:
    """Return the key of a call: its name, with the class of a model."""
    name, owner = _name(call.func), _name(getattr(call.func, "value", None))
    return f"{owner}.{name}()" if name == "from_pretrained" else f"{name}()"


def _computed(call: ast.Call) -> Computed:
    return Computed(f"line {call.lineno}: {ast.unparse(call)}"[:SHOWN_CHARS])

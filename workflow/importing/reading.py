"""Files of other trainers: their keys and values, and the tables that say what these mean.

A Python script is parsed and never run: read are the arguments of the first calls that set up a
model, an adapter, a trainer and a dataset, where they are literals or names of literals."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict

from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.input_files import read_input

TABLES = Path(__file__).parents[1] / "resources" / "trainers"
TrainerName = Literal["axolotl", "llama_factory", "trl", "unsloth"]
Kind = Literal[
    "taken", "changed", "by default", "not needed",
    "without counterpart", "without effect", "unknown", "refused",
]  # fmt: skip
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML reads 1e-5 as a text
TRAINER = re.compile(r"(?:Unsloth)?(\w*?)(Trainer|Config|TrainingArguments)")
MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel", "AutoModelForCausalLM")
OF_DATASET = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}


class Words(BaseModel):
    """A setting's values by other words; `otherwise` stands for all that are not listed."""

    setting: str
    otherwise: str
    why: str
    values: dict[str, list[Any]]


class Table(BaseModel):
    """A trainer's keys, as `workflow/resources/trainers/transformers.yaml` explains."""

    model_config = ConfigDict(extra="forbid")

    title: str = ""
    known_by: list[str] = []
    defaults: dict[str, Any] = {}
    defaults_of_preferences: dict[str, Any] = {}
    columns: dict[str, str] = {}
    called: dict[str, str] = {}
    same: dict[str, str] = {}
    words: dict[str, Words] = {}
    below: list[str] = []
    reasons: dict[Kind, dict[str, list[str]]] = {}

    def accounts(self) -> dict[str, tuple[Kind, str]]:
        """Return what becomes of a key that no setting stands for, and why."""
        kinds = self.reasons.items()
        return {key: (kind, why) for kind, of in kinds for why in of for key in of[why]}


class Computed(NamedTuple):
    """An argument that a script computes, as it is written there."""

    text: str


class Source(NamedTuple):
    """A file of another trainer: whose it is, and its keys with their values."""

    file: Path
    trainer: TrainerName
    values: dict[str, Any]


@cache
def table(name: str) -> Table:
    """Return the table of a trainer, or of `transformers`: the keys that all trainers share."""
    return Table.model_validate(yaml.safe_load((TABLES / f"{name}.yaml").read_text("utf-8")))


def read_source(file: Path, trainer: TrainerName | None) -> Source:
    """Read a file; trainer: None = its keys decide. Raises `UserError` for what is no such file."""
    if file.suffix == ".py":
        return Source(file, trainer or "unsloth", read_script(file))
    check_yaml(file)
    document = yaml.safe_load(read_input(file))
    if not isinstance(document, dict) or not document:
        what = "has no keys" if document else "is empty"
        raise UserError(f"{file}: it {what}. Name a trainer's YAML file, or a Python script.")
    values = {str(key): _numbers(value) for key, value in document.items()}
    return Source(file, trainer or _whose(file, values), values)


def _whose(file: Path, values: Mapping[str, Any]) -> TrainerName:
    names: tuple[TrainerName, ...] = get_args(TrainerName)
    owners = [name for name in names if not values.keys().isdisjoint(table(name).known_by)]
    if len(owners) != 1:
        said = " and ".join(table(name).title for name in owners)
        why = f"it has keys of {said}" if said else "no key tells whose file it is"
        titles = ", ".join(table(name).title for name in names)
        change = f"--from says whose it is: {', '.join(names)}"
        raise UserError(f"{file}: {why}. Files of {titles} are read; {change}.")
    return owners[0]


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value


def read_script(file: Path) -> dict[str, Any]:
    """Return the arguments of a script's calls, of each kind of call the first one's."""
    try:
        nodes = list(ast.walk(ast.parse(read_input(file))))
    except (SyntaxError, RecursionError) as error:
        raise UserError(f"{file}: it is no Python ({error}). Correct it.") from None
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    names = {ast.unparse(target): node.value for node in assigned for target in node.targets}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    values, seen = dict[str, Any](), set[str]()
    for call in sorted(calls, key=lambda node: node.lineno):
        kind, arguments = _arguments(call)
        if not kind or kind in seen:
            continue
        seen.add(kind)
        for key, node in arguments:
            value = _literal(node, names)
            if values.setdefault(key, value) != value and not isinstance(value, Computed):
                name, bound = f"{file}, line {call.lineno}: {key}", f"it was {values[key]!r} before"
                raise setting_error(name, value, bound, "Give both calls one value")
    if not seen:
        raise UserError(f"{file}: no call in it sets up a training. Name another file.")
    return values


def _arguments(call: ast.Call) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Return what kind of call it is, "" for one that is not read, and its arguments."""
    *owner, name = ast.unparse(call.func).split(".")
    words = {word.arg: word.value for word in call.keywords if word.arg is not None}
    first: dict[str, Any] = {}
    if name == "load_dataset":
        words = {OF_DATASET.get(key, key): value for key, value in words.items()}
        first = dict(zip(OF_DATASET.values(), call.args, strict=False))
    elif name == "from_pretrained" and owner[-1:] and owner[-1] in MODELS:
        first = {"model_name": call.args[0]} if call.args else {}
        first |= {owner[-1]: True} if owner[-1] == "FastVisionModel" else {}
    elif name in ("get_peft_model", "LoraConfig"):
        name, first = "adapter", {"adapter": "lora"}
    elif name == "train_on_responses_only":
        first = {name: True}
    elif match := TRAINER.fullmatch(name):
        objective = {"objective": match[1].lower() or "sft"}
        name, first = match[2], objective if match[2] == "Trainer" else {}
    else:
        name = ""
    return name, iter((first | words).items())


def _literal(node: Any, names: Mapping[str, ast.expr]) -> Any:
    if not isinstance(node, ast.expr):
        return node
    try:
        return ast.literal_eval(names.get(ast.unparse(node), node))
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return Computed(ast.unparse(node))

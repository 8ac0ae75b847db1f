"""Files of other trainers: their keys and values, and the tables with the keys' meanings."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict

from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input

TABLES = Path(__file__).parents[1] / "resources" / "trainers"
TrainerName = Literal["axolotl", "llama_factory", "trl"]
Kind = Literal[
    "taken", "changed", "by default", "not needed",
    "without counterpart", "without effect", "unknown", "refused",
]  # fmt: skip
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML reads 1e-5 as text


class Words(BaseModel):
    """A setting's values by their words; `otherwise` is for all unlisted ones."""

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
    loss_on: Literal["completions", "all"] = "completions"
    loss_note: str = ""
    """Trained tokens without a key for them, and the difference to the trainer."""
    columns: dict[str, str] = {}
    called: dict[str, str] = {}
    same: dict[str, str] = {}
    words: dict[str, Words] = {}
    below: list[str] = []
    reasons: dict[Kind, dict[str, list[str]]] = {}
    only_as: dict[str, list[Any]] = {}
    """Values of keys for which their reason holds; other values change what is trained."""

    def accounts(self) -> dict[str, tuple[Kind, str]]:
        """Return the outcome of a key without a setting, and its reason."""
        kinds = self.reasons.items()
        return {key: (kind, why) for kind, of in kinds for why in of for key in of[why]}


class Source(NamedTuple):
    """A file of another trainer: the trainer, and its keys with their values."""

    file: Path
    trainer: TrainerName
    values: dict[str, Any]


@cache
def table(name: str) -> Table:
    """Return the table of a trainer, or of `transformers`: the keys that all trainers share."""
    return Table.model_validate(yaml.safe_load((TABLES / f"{name}.yaml").read_text("utf-8")))


def read_source(file: Path, trainer: TrainerName | None) -> Source:
    """Read a file; trainer: None: its keys decide. Raises `UserError` for any other file."""
    if file.suffix == ".py":
        raise UserError(
            f"{file}: Python scripts are not read. Name a trainer's YAML file, or write a config "
            "by hand (workflow/docs/configuration.md)."
        )
    check_yaml(file)
    document = yaml.safe_load(read_input(file))
    if not isinstance(document, dict) or not document:
        what = "has no keys" if document else "is empty"
        raise UserError(f"{file}: it {what}. Name a trainer's YAML file.")
    values = {str(key): _numbers(value) for key, value in document.items()}
    return Source(file, trainer or _detected_trainer(file, values), values)


def _detected_trainer(file: Path, values: Mapping[str, Any]) -> TrainerName:
    names: tuple[TrainerName, ...] = get_args(TrainerName)
    owners = [name for name in names if not values.keys().isdisjoint(table(name).known_by)]
    if len(owners) != 1:
        titles_matching = " and ".join(table(name).title for name in owners)
        why = (
            f"it has keys of {titles_matching}"
            if titles_matching
            else "no key tells whose file it is"
        )
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

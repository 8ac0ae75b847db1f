"""A `config.yaml` from another trainer's keys, with an outcome for each of them."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from workflow.importing.reading import Kind, Source, Words, table
from workflow.lib.settings.config import Config
from workflow.lib.settings.objectives import ObjectiveName, needs_of
from workflow.lib.system.errors import UserError, as_yaml, setting_error
from workflow.lib.system.near_names import near_names

SHOWN_CHARS = 80
OFF: tuple[Any, ...] = (None, False, "", "no", "none", "off", 0, [], {})


class Outcome(NamedTuple):
    """The outcome of keys, as spelled in the file, with its reason or setting."""

    kind: Kind
    keys: tuple[str, ...]
    why: str


class Draft:
    """The settings so far. Keys have their names in Transformers and PEFT (`Table.called`)."""

    def __init__(self, source: Source, *, gpus: int | None) -> None:
        self.source, self.gpus = source, gpus
        self.own_table, self.shared_table = table(source.trainer), table("transformers")
        self.objective: ObjectiveName = "sft"
        self.document: dict[str, dict[str, Any]] = {}
        self.outcomes: list[Outcome] = []
        self.came_from: dict[str, str] = {}
        self.spelled: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._read, self._settled, self._noted = set[str](), set[str](), set[str]()
        for key, value in source.values.items():
            if isinstance(value, dict) and key in self.shared_table.below:
                self.add(f"{key}.", value)
            else:
                self.add("", {key: value})

    def add(self, prefix: str, values: dict[str, Any]) -> None:
        """Add keys. Raises `UserError` for two of one meaning."""
        for key, value in values.items():
            spelled = f"{prefix}{key}"
            name = self.own_table.called.get(spelled, spelled)
            if spelled not in self.own_table.called and spelled in self.own_table.called.values():
                name = f"{spelled} of another trainer"
            earlier = self._values.get(name)
            if value not in (*OFF, earlier) and earlier not in OFF and not prefix:
                where, first = f"{self.source.file}: {spelled}", self.spelled[name]
                raise setting_error(where, value, f"{first} means the same", "Remove one of them")
            names = [self.spelled[name]] if name in self.spelled and not prefix else []
            self.spelled[name] = ", ".join([*names, spelled])
            if value is not None and earlier in OFF:
                self._values[name] = value

    def has(self, key: str) -> bool:
        """Whether the file gives a value."""
        self._read.add(key)
        return key in self._values

    def get(self, key: str) -> Any:
        """Return the file's value, else the trainer's default."""
        if self.has(key):
            return self._values[key]
        preferences = {} if self.objective == "sft" else self.own_table.defaults_of_preferences
        defaults = self.shared_table.defaults | self.own_table.defaults | preferences
        return defaults.get(key)

    def number(self, key: str) -> Any:
        """Return a number, or None. Raises `UserError` for any other value."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self.wrong(key, "must be a number")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, or the parts of a text between commas. Raises `UserError`."""
        value = self.get(key) or []
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise self.wrong(key, "must be a text, or a list of texts")
        return [part.strip() for part in parts if part.strip()]

    def wrong(self, key: str, bound: str) -> UserError:
        """Return the error of an impossible value."""
        where = f"{self.source.file}: {self.spelled.get(key, key)}"
        return setting_error(where, self._values.get(key), bound, "Change it there")

    def put(self, setting: str, value: Any, *keys: str, how: str = "") -> None:
        """Set a setting to the meaning of the keys; how: changes on the way. A trainer's default is
        set if ours differs."""
        present = [key for key in keys if self.has(key)]
        section, name = setting.split(".")
        if section == "preferences" and setting not in needs_of(self.objective).settings:
            self.note("without effect", keys, f"train.objective {self.objective} does not read it")
            return
        fields = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        if keys and not present and value == fields[name].get_default(call_default_factory=True):
            return
        self.document.setdefault(section, {})[name] = value
        self.came_from[setting] = ", ".join(self.spelled[key] for key in present)
        shown = f"{setting} = {as_yaml(value)}" + (f": {how}" if how else "")
        if present:
            self.note("changed" if how else "taken", keys, shown)
        elif keys:
            self.outcomes.append(Outcome("by default", (), shown))
        self._settled.update(keys)

    def note(self, kind: Kind, keys: Iterable[str], why: str) -> None:
        """Note the outcome of those keys that the file has, without another outcome."""
        unnoted = [key for key in keys if key in self.spelled and key not in self._noted]
        self._noted.update(unnoted)
        if unnoted:
            self.outcomes.append(Outcome(kind, tuple(self.spelled[key] for key in unnoted), why))

    def refuse(self, key: str, why: str) -> None:
        """Note that no config can replace this key, or its absence."""
        value = f"= {self._values[key]!r}"[:SHOWN_CHARS] if key in self._values else "is not given"
        usual = next(
            (name for name, canonical in self.own_table.called.items() if canonical == key), key
        )
        name = f"{self.spelled.get(key, usual)} {value}"
        self._noted.add(key)
        self.outcomes.append(Outcome("refused", (name,), why))

    def follow_tables(self) -> None:
        """Set, or account for, all keys without a rule."""
        for name, setting in (self.shared_table.same | self.own_table.same).items():
            if name not in self._settled | self._noted and self.get(name) is not None:
                self.put(setting, self.get(name), name)
        for name, words in (self.shared_table.words | self.own_table.words).items():
            if name not in self._settled | self._noted and self.get(name) not in OFF:
                self._translate(name, words)
        reasons = self.shared_table.accounts() | self.own_table.accounts()
        valid_keys = {*self._read, *self.own_table.called, *reasons}
        for name in self.spelled:
            if name not in self._noted:
                self._account(name, *reasons.get(name, ("unknown", "")), valid_keys=valid_keys)

    def _translate(self, name: str, words: Words) -> None:
        word = self.get(name)
        values = [
            value for value, spellings in words.values.items() if word == value or word in spellings
        ]
        how = "" if values else f"for {word!r}: {words.why}"
        self.put(words.setting, [*values, words.otherwise][0], name, how=how)

    def _account(self, name: str, kind: Kind, why: str, *, valid_keys: set[str]) -> None:
        value = self._values.get(name)
        holds_for = (self.shared_table.only_as | self.own_table.only_as).get(name, [value])
        if kind == "unknown" and name not in valid_keys:
            near = near_names(self.spelled[name], valid_keys)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.note(kind, [name], f"nothing of it is in the config{hint}")
        elif kind == "unknown" or (value in OFF and (kind != "changed" or value is None)):
            self.note("without effect", [name], "empty, off, or left out by other keys")
        elif value not in holds_for:
            usual = " or ".join(map(str, holds_for))
            self.note("without counterpart", [name], f"here it is always {usual}")
        elif kind == "refused":
            self.refuse(name, why)
        else:
            self.note(kind, [name], why)


def label(name: str) -> str:
    """Return the last part of a path as names in settings may be."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rpartition("/")[2])
    return plain.lstrip("._-")[:64] or "imported"

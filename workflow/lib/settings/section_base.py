"""Shared code of all sections of the settings: their model, types of several sections, and the
effects of a setting: the stages that read it, and what changes when it is edited."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from workflow.lib.settings.errors_in_words import NAME_PATTERN, is_section
from workflow.lib.system.redaction import holds_secret

Stage = Literal[
    "extend_model",
    "tokenize_dataset",
    "measure_sensitivity",
    "quantize_base",
    "sample_answers",
    "score_answers",
    "pack_answers",
    "score_tokens",
    "preflight_run",
    "finetune",
    "consolidate",
    "export_step",
    "convert_merged",
    "check_gguf",
    "convert_gguf",
    "publish_run",
    "evaluate_run",
    "check_served",
    "write_card",
    "require_gain",
    "render_report",
]
# none: editing it reruns nothing. plan: it reruns preflight alone. result: it reruns all stages
# that read it, and finished work and checkpoints of another value are not used.
Effect = Literal["none", "plan", "result"]


@dataclass(frozen=True)
class Affects:
    """Effects of one setting. A section declares them once (`affects`); a different setting has its
    own marker, in which None stands for its section's."""

    effect: Effect | None = None
    stages: tuple[Stage, ...] | None = None
    """Stages that read it."""
    needs: tuple[str, ...] = ()
    """The setting beside it (or a property of these), and the values of it without which it means
    nothing."""

    def within(self, section: "Affects") -> "Affects":
        """Fill in the section's effects."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(section, **{name: value for name, value in own.items() if value is not None})

    def read_by(self, stage: str) -> bool:
        return stage in (self.stages or ())

    def reruns(self, stage: str) -> bool:
        planned = self.effect == "plan" and stage == "preflight_run"
        return self.read_by(stage) and (self.effect == "result" or planned)


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UNIONS = (Union, UnionType)
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def label(path: str, *, default: str) -> str:
    """Return a `Name` made of the last part of a path that has a letter or digit and no wildcard,
    without extensions of files; `default` if no part has."""
    for part in reversed(path.split("/")):
        stem = re.sub(r"(\.(jsonl?|csv|tsv|parquet|arrow|txt|md|gz|zst|bz2|xz))+$", "", part)
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:64]
        if plain and not re.search(r"[*?\[]", part):
            return plain
    return default


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    affects: ClassVar[Affects] = Affects()

    @classmethod
    @cache
    def affected_by(cls, key: str) -> Affects:
        markers = (m for m in cls.model_fields[key].metadata if isinstance(m, Affects))
        return next(markers, Affects()).within(cls.affects)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, document: Any) -> Any:
        """Read an empty section (null in YAML) as its defaults."""
        if not isinstance(document, Mapping):
            return document
        return {k: v for k, v in document.items() if v is not None or not is_section(cls, k)}

    @field_validator("*", mode="before")
    @classmethod
    def _text_that_files_can_hold(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse empty text, an entry of a list that stands there twice, and text that no file can
        hold (half a character, as `"\\ud800"` in YAML gives) or should (a password)."""
        if value == "" and cls.model_fields[str(info.field_name)].default == "":
            return value  # required settings, which `check_sources` asks for
        texts = value if isinstance(value, list | tuple) else [value]
        for number, text in enumerate(texts, 1):
            entry = f"entry {number} " if texts is value else ""
            if text == "":
                raise PydanticCustomError("empty_text", f"{entry}must not be empty")
            if isinstance(text, str | int) and text in texts[: number - 1]:
                raise PydanticCustomError("repeated", f"{entry}stands there twice")
        strings = [text for text in texts if isinstance(text, str)]
        if any(text.encode(errors="ignore").decode() != text for text in strings):
            raise PydanticCustomError("string_unicode", "must be text that UTF-8 can hold")
        if any(map(holds_secret, strings)):
            raise PydanticCustomError(
                "secret",
                "must hold no password or token (results name it): set it in the environment",
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for numbers, and numbers or texts for true: pydantic would convert both."""
        assert info.field_name is not None, "a validator of fields runs for a field"
        annotation = cls.model_fields[info.field_name].annotation
        branches = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
        kinds = {get_args(b)[0] if get_origin(b) is Annotated else b for b in branches}
        numbers = kinds & {int, float}
        if isinstance(value, bool) and bool not in kinds and numbers:
            raise PydanticCustomError("true_for_number", "must be a number, not true or false")
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        is_one = isinstance(value, bool | None) or value in words
        if bool in kinds and not is_one and not (numbers and not isinstance(value, str)):
            *most, last = ["true", "false", *words] + ["a number"] * bool(numbers)
            raise PydanticCustomError("bool_or_word", f"must be {', '.join(most)} or {last}")
        return value

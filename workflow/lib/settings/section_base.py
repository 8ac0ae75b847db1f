"""Shared code of all sections of the settings: their model, and types of several sections."""

import re
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from workflow.lib.settings.effects import Affects
from workflow.lib.settings.errors_in_words import NAME_PATTERN, is_section
from workflow.lib.system.redaction import holds_secret

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

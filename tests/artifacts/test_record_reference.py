"""The written page of fields: it is what the records say, and every field says what it means."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from workflow.lib.artifacts import record_reference
from workflow.lib.artifacts.record_reference import (
    FILES,
    artifact_fields_md,
    inner_records,
    spell_field,
    spell_type,
)
from workflow.lib.artifacts.records import Record

MEND = "`python -m workflow.scripts.write_artifact_fields` writes it again"
OF_FILES = [record for _, records in FILES for record in records]


class Example(Record):
    """An object."""

    once: int
    perhaps: list[int] | None = None


def test_page_is_what_the_records_say() -> None:
    assert record_reference.PAGE.read_text(encoding="utf-8") == artifact_fields_md(), MEND


def test_page_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reference, "PAGE", tmp_path / "page.md")
    record_reference.write_page()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == artifact_fields_md()


@pytest.mark.parametrize("record", OF_FILES, ids=lambda record: record.__name__)
def test_every_field_is_described(record: type[Record]) -> None:
    undescribed = [
        f"{kind.__name__}.{name}"
        for kind in (record, *inner_records(record))
        for name, field in kind.model_fields.items()
        if not field.description
    ]
    assert undescribed == []


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (str | None, "text; or null"),
        (bool | int, "true or false; or whole number"),
        (list[float], "list of numbers"),
        (tuple[str, ...], "list of texts"),
        (tuple[float, float], "[number, number]"),
        (dict[str, list[Example]], "mapping to list of [Example](#example)"),
        (Literal["fits", "does_not_fit"], "`fits`, `does_not_fit`"),
        (Annotated[int, Field(ge=1)], "whole number"),
        (dict[str, Any], "mapping to any value"),
    ],
)
def test_type_is_spelled_in_words(annotation: Any, words: str) -> None:
    assert spell_type(annotation) == words


def test_field_with_a_default_may_be_absent() -> None:
    fields = Example.model_fields
    assert spell_field(fields["once"]) == "whole number"
    assert spell_field(fields["perhaps"]) == "list of whole numbers; or absent"

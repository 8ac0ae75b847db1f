"""The JSON files that stages exchange, as types: each field once, with what it means.

A stage writes a record (`Record.as_json`), another reads it (`read_records.read_record`). The
comment at a field is its reference. The files of the stages are in `manifest_record` (tokens),
`preflight_record`, `training_record`, `parity_record` and `evaluation_record`."""

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from workflow.lib.system.files import provenance

Interval = tuple[float, float]


class Record(BaseModel):
    """Base of all records: frozen, strict types, finite numbers, further fields ignored; values as
    they are, without conversion. A field with a default may be missing in a file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    advice: ClassVar[str] = "Run the stage that writes it again."
    """What to do about a file that does not hold this record."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as its JSON: fields in order, without those that were not given."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Provenance(Record):
    """What made an artifact (`files.provenance`)."""

    stage: str  # name of the stage
    commit: str | None
    """Commit of the workflow, `-dirty` appended if it had changes; null outside a checkout."""
    packages: dict[str, str]
    """Version of Python, and of every installed package that can change a result."""
    platform: str  # operating system and kind of processor
    cpu_count: int | None  # processors of the machine
    created_utc: str  # when it was made, UTC, ISO 8601

    @classmethod
    def now(cls) -> Self:
        return cls.model_validate(provenance())

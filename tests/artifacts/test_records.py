"""The records are the reference of the JSON artifacts' fields."""

import importlib
import pkgutil
from collections.abc import Iterator

from workflow.lib import artifacts
from workflow.lib.artifacts.records import Record


def records(base: type[Record]) -> Iterator[type[Record]]:
    for record in base.__subclasses__():
        yield record
        yield from records(record)


def test_every_field_of_every_record_says_what_it_means():
    for module in pkgutil.iter_modules(artifacts.__path__):
        importlib.import_module(f"{artifacts.__name__}.{module.name}")
    found = [
        record for record in records(Record) if record.__module__.startswith(artifacts.__name__)
    ]
    assert len(found) > 30
    assert [
        f"{record.__name__}.{name}"
        for record in found
        for name, field in record.model_fields.items()
        if not field.description
    ] == []

"""What the stages write is what the records declare, so that the page of fields is complete."""

import types
import typing

from tests.support.tokenizing import Stage
from workflow.lib.artifacts.manifest_record import ConversationFacts, Manifest, Probe
from workflow.lib.artifacts.records import Record
from workflow.lib.artifacts.training_record import Step, Summary
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.files import read_checked_json


def undeclared(document, annotation):
    arguments = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType):
        for option in arguments:
            yield from undeclared(document, option)
    elif isinstance(document, list) and arguments:
        for value in document:
            yield from undeclared(value, arguments[0])
    elif isinstance(document, dict) and typing.get_origin(annotation) is dict:
        for value in document.values():
            yield from undeclared(value, arguments[1])
    elif isinstance(document, dict) and issubclass(annotation, Record):
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        if annotation.model_config["extra"] != "allow":
            yield from (f"{annotation.__name__}.{name}" for name in document.keys() - fields.keys())
        for name in document.keys() & fields.keys():
            yield from undeclared(document[name], fields[name].annotation)


def test_every_field_of_the_summary_is_declared(run):
    document = read_checked_json(run / "finetune" / "summary.json")
    assert list(undeclared(document, Summary)) == []
    assert list(undeclared(document | {"speed": 1}, Summary)) == ["Summary.speed"]


def test_every_field_of_a_step_is_declared(run):
    lines = read_lines(run / "finetune" / "metrics.jsonl")
    assert lines
    assert list(undeclared(lines, list[Step])) == []


def test_every_field_of_the_manifest_is_declared(tmp_path, tokenizer_folder):
    """`TokenFiles` names one file and speaks of all."""
    manifest = Stage(tmp_path, tokenizer_folder).run().manifest
    missing = {name for name in undeclared(manifest, Manifest) if "TokenFiles" not in name}
    assert missing == {f"Manifest.{name}" for name in ConversationFacts.model_fields}
    assert list(undeclared(manifest["probes"], list[Probe])) == []

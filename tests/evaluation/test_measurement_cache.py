import json
import logging

import pytest

from workflow.lib.evaluation.measurement_cache import Archive, content_key
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.files import write_checksums

FACTS = {"documents": "0123", "dtype": "float32"}
VALUE = [[1.25, 3], [0.1, 7]]


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "evaluations")


def test_what_was_kept_is_found(archive):
    archive.keep("subject", "heldout", FACTS, VALUE)
    assert archive.find("subject", "heldout", FACTS) == VALUE


@pytest.mark.parametrize(
    ("subject", "part", "facts"),
    [
        ("other", "heldout", FACTS),
        ("subject", "samples", FACTS),
        ("subject", "heldout", FACTS | {"dtype": "bfloat16"}),
    ],
)
def test_nothing_is_found_for_another_subject_part_or_fact(archive, subject, part, facts):
    archive.keep("subject", "heldout", FACTS, VALUE)
    assert archive.find(subject, part, facts) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1.25", "1.24"),
        lambda text: "[]",
        lambda text: "",
    ],
    ids=["cut", "edited", "of another kind", "empty"],
)
def test_damaged_entry_is_ignored_with_a_note(archive, damage, caplog, monkeypatch):
    archive.keep("subject", "heldout", FACTS, VALUE)
    (file,) = archive.folder.glob("*/*.json")
    file.write_text(damage(file.read_text()))
    monkeypatch.setattr(logging.getLogger("workflow"), "propagate", True)
    assert archive.find("subject", "heldout", FACTS) is None
    assert f"{file} is damaged" in caplog.text
    archive.keep("subject", "heldout", FACTS, VALUE)
    assert archive.find("subject", "heldout", FACTS) == VALUE


def test_entry_tells_what_made_it_and_its_name_what_it_is(archive):
    archive.keep("subject", "task-mmlu/law", FACTS, VALUE)
    (file,) = archive.folder.glob("subject/task-mmlu_law-*.json")
    assert json.loads(file.read_text())["provenance"]["packages"]["torch"]


def folder(path, **files):
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    write_checksums(path)
    return path


def test_key_of_folders_is_that_of_their_content_but_for_what_describes_them(tmp_path):
    one = folder(tmp_path / "one", weights="a", config="b", **{"README.md": "made today"})
    same = folder(tmp_path / "same", weights="a", config="b", **{"README.md": "made before"})
    other = folder(tmp_path / "other", weights="a", config="c")
    first, equal, second = (listed_files(path) for path in (one, same, other))
    assert content_key(first) == content_key(equal)
    assert len({content_key(first), content_key(second), content_key(first, second)}) == 3

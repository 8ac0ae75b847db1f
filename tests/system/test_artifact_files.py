"""JSON artifacts: a flipped bit, a lost end or a missing file is refused by name, never read."""

import random

import pytest

from workflow.lib.system.checksums import read_artifact, read_lines, write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json

VALUE = {"loss": 1.25, "name": "Grüße", "sizes": {10: 1, 9: 2}, "pair": (1, 2)}
READ = {"loss": 1.25, "name": "Grüße", "sizes": {"10": 1, "9": 2}, "pair": [1, 2]}


def test_artifact_is_read_as_json_says_it(tmp_path):
    """Keys become texts, and tuples lists, before the checksum is taken."""
    write_checked_json(tmp_path / "a.json", VALUE)
    assert read_artifact(tmp_path / "a.json") == READ
    write_lines(tmp_path / "a.jsonl", [VALUE, {"text": "a\nb\u2028c"}])
    assert read_lines(tmp_path / "a.jsonl") == [READ, {"text": "a\nb\u2028c"}]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_every_flipped_bit_is_refused_or_means_the_same(tmp_path, kind):
    """It means the same between two fields, or in how a character is spelled."""
    path, damaged = tmp_path / f"whole.{kind}", tmp_path / f"damaged.{kind}"
    if kind == "json":
        write_checked_json(path, VALUE)
    else:
        write_lines(path, [VALUE, VALUE])
    read = read_artifact if kind == "json" else read_lines
    content, messages = path.read_bytes(), list[str]()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << random.Random(place).randrange(8)
        damaged.write_bytes(flipped)
        try:
            found = read(damaged)
        except UserError as error:
            messages.append(str(error))
        else:
            assert found == read(path)
    assert len(messages) > 0.8 * len(content)
    assert all(message.startswith(f"{damaged} is damaged: it ") for message in messages)
    assert all(f"Delete the folder {tmp_path} and repeat" in message for message in messages)


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", "[" * 100_000, '{"sha256": 1}'])
def test_file_without_its_checksum_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json is damaged"):
        read_artifact(tmp_path / "a.json")


def test_missing_file_is_named(tmp_path):
    for read in (read_artifact, read_lines):
        with pytest.raises(UserError, match=r"a\.json: there is no such file"):
            read(tmp_path / "a.json")

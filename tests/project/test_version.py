"""The release has one version, whoever names it."""

import re
import tomllib
from pathlib import Path

import pytest

from workflow import VERSION

ROOT = Path(__file__).resolve().parents[2]
NAMED = {"CITATION.cff": r"^version: (\S+)$", "CHANGELOG.md": r"^## \[(\d[^]]*)\]"}


def test_package_has_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == VERSION


@pytest.mark.parametrize("name", NAMED)
def test_newest_release_has_the_version(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(NAMED[name], text, re.MULTILINE)
    assert found[1] == VERSION

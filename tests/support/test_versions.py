"""Sets of package versions name what the workflow needs, and what was found stands in a file."""

import json

from tests.support.versions import FOUND, REQUIREMENTS, ROOT, SETS, required


def test_packages_of_included_files_are_required_too():
    packages = required("dev.txt")
    assert {"pytest", *required("mlflow.txt"), *required("gguf.txt")} <= {*packages}
    assert not [line for line in packages if line.startswith("-")]


def test_sets_choose_packages_that_are_required():
    everything = {line for name in REQUIREMENTS for line in required(f"{name}.txt")}
    for versions in SETS.values():
        assert versions.keys() <= everything


def test_what_was_found_is_told_where_people_look():
    told = (ROOT / "README.md").read_text(encoding="utf-8")
    for found in json.loads(FOUND.read_text(encoding="utf-8")).values():
        assert f"torch {found['versions']['torch']}" in told
        assert f"Transformers {found['versions']['transformers']}" in told
        assert found["date"] in told

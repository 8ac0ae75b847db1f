"""The merged model in another format: two readers give the same loss, else nothing is written."""

import argparse

import pytest

from tests.support.report_examples import parity
from tests.support.tiny_export import exported_run, random_documents, tiny_tokens
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ReaderCheck
from workflow.lib.settings.forms import CONVERTED
from workflow.lib.system.checksums import check_files, listed_files
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.scripts.convert_merged import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = exported_run(tmp_path_factory.mktemp("export"))
    tiny_tokens(folder / "tokens", random_documents(9))
    return folder


def converted(folder, target, form, *, tolerance=1e-4):
    write_checked_json(target / "parity.json", parity() | {"tolerance": tolerance})
    main(
        argparse.Namespace(
            config={"model": {}, "export": {"shard_gib": 1.0}},
            form=form,
            merged=folder / "merged",
            parity=target / "parity.json",
            tokens=folder / "tokens",
            output=target / form,
            comparison=target / f"{form}.json",
        )
    )
    return read_record(target / f"{form}.json", ReaderCheck)


@pytest.mark.parametrize("form", CONVERTED)
def test_format_is_smaller_and_read_alike(folder, tmp_path, form):
    check = converted(folder, tmp_path, form)
    assert check.worst_document <= check.bound
    assert (check.documents, check.compute_dtype) == (9, "float32")
    assert check.bytes < sum(p.stat().st_size for p in (folder / "merged").glob("*.safetensors"))
    files = listed_files(tmp_path / form)
    check_files(files)
    assert {"config.json", "tokenizer.json"} <= {file.name for file in files}


@pytest.mark.parametrize("form", CONVERTED)
def test_readers_further_apart_than_the_bound_leave_no_model(folder, tmp_path, form):
    with pytest.raises(UserError, match=rf"export\.{form}: .* apart, and .* Nothing is exported"):
        converted(folder, tmp_path, form, tolerance=-1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["parity.json"]

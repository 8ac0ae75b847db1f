"""The stage that writes GGUF files: what it needs is said before anything runs, and llama.cpp
serves what was trained."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.llama_cpp_model import converters, forked_converters, prepare, prepare_mixture
from tests.support.served_export import check
from tests.support.shared import made_once
from tests.support.workflow_project import make_project
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks
from workflow.lib.evaluation.llama_cpp_server import BOUNDS
from workflow.lib.settings.config import load_config
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json, write_checksums
from workflow.scripts.convert_gguf import main


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ({"gguf": ["q8_0"]}, r"export: gguf = q8_0: it is made of the merged model"),
        ({"gguf": ["q2_k"], "merged": True}, r"entry 1 must be 'f32', .* or 'q4_k_m'"),
    ],
)
def test_what_it_needs_is_said_with_the_settings(export, message):
    with pytest.raises(UserError, match=message):
        load_config({"export": export})


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("lora", {"use_dora": True}),
        ("lora", {"modules_to_save": ["lm_head"]}),
        ("model", {"add_tokens": ["<a>"]}),
    ],
)
def test_adapter_that_gguf_cannot_hold_is_refused(section, setting):
    export = {"gguf": ["q8_0"], "gguf_of": ["adapter"]}
    with pytest.raises(UserError, match=rf"pairs of matrices alone: {section}\.{min(setting)} = "):
        load_config({"export": export, section: setting})


@pytest.fixture
def project(tmp_path):
    made = make_project(tmp_path / "project")
    (made.root / "llama.cpp").mkdir()
    made.edit({"export": {"merged": True, "gguf": ["bf16"], "llama_cpp": "llama.cpp"}})
    return made


def test_folder_without_the_converter_is_refused_before_anything_runs(project):
    done = project.snakemake("--dry-run", "all")
    assert done.status == 1
    assert f"export.llama_cpp = 'llama.cpp/{CONVERTER}' (run demo): there is no" in done.output


def test_files_are_planned_after_the_merged_model(project):
    (project.root / "llama.cpp" / CONVERTER).write_text("")
    planned = project.planned("train")
    assert planned["convert_gguf"] == 1
    assert "download_converter" not in planned


def test_converters_are_downloaded_where_no_checkout_is_named(project):
    project.edit({"export": {"llama_cpp": None}})
    assert project.planned("train")["download_converter"] == 1


def test_bounds_are_those_of_the_documents():
    page = (Path(__file__).parents[2] / "workflow/docs/serve.md").read_text()
    rows = re.findall(r"^\| ([\w, ]+) \| ([\d.]+) \|", page, re.MULTILINE)
    told = {name: float(bound) for names, bound in rows for name in names.split(", ")}
    assert told == BOUNDS


def write_gguf(folder, forms, *, llama_cpp):
    """Run the stage on what `prepare` has made."""
    export = {"merged": True, "gguf": ["f32", "q4_k_m"], "gguf_of": forms}
    main(
        argparse.Namespace(
            config={"export": export},
            run="demo",
            merged=folder / "merged",
            model=folder / "model",
            adapter=folder / "adapter",
            tokens=folder / "tokens",
            converter=llama_cpp,
            output=folder / "convert_gguf",
        )
    )


@pytest.fixture(scope="module")
def served(shared_folder):
    """The stage's folder of both forms; skipped where the package index cannot be reached.

    Its converters are forked; a mixture is converted as a user converts."""
    llama_cpp = converters()

    def convert(folder):
        prepare(folder)
        with forked_converters(folder):
            write_gguf(folder, ["merged", "adapter"], llama_cpp=llama_cpp)

    return made_once(shared_folder / "gguf", convert) / "convert_gguf"


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_llama_cpp_serves_what_was_trained(served, form):
    """The adapter has two ranks and scales that llama.cpp does not know."""
    check_served(served, form)


@pytest.mark.parametrize("form", ["merged", "tuned_on_original"])
def test_served_file_is_compared_with_the_evaluation(served, form, tmp_path):
    found = check(served.parent, form, tmp_path, gguf=served)
    assert (found.compute_dtype, found.bound) == ("f32", BOUNDS["f32"])
    assert found.server.startswith("llama.cpp (xllamacpp 2")
    assert found.worst_document < found.bound
    assert found.answer_gap < found.bound
    if form == "merged":
        assert found.adapter is None
    else:
        assert found.adapter.share == pytest.approx(1.0, abs=0.01)


def test_file_of_another_model_is_noticed(served, tmp_path):
    """The adapter's file is that of nothing, and all it should change is missing."""
    other = shutil.copytree(served, tmp_path / "gguf")
    record = json.loads((other / "gguf.json").read_text())
    for file in record["files"]:
        file["adapter"] = None
    del record["sha256"]
    write_checked_json(other / "gguf.json", record)
    write_checksums(other)
    with pytest.raises(
        UserError, match=r"serve: llama\.cpp .* gives held-out tokens .* Choose a f"
    ):
        check(served.parent, "tuned_on_original", tmp_path, gguf=other)


def test_llama_cpp_serves_a_mixture_of_experts(tmp_path):
    llama_cpp = converters()
    prepare_mixture(tmp_path, "mixtral")
    write_gguf(tmp_path, ["merged"], llama_cpp=llama_cpp)
    check_served(tmp_path / "convert_gguf", "merged")


def check_served(folder, form):
    files = read_record(folder / "gguf.json", GgufChecks).files
    found = {file.format: file for file in files if file.form == form}
    assert list(found) == ["f32", "q4_k_m"]
    exact = found["f32"]
    assert exact.loss == pytest.approx(exact.reference_loss, abs=1e-3)
    assert exact.equal_answers == exact.answers == 3
    assert exact.prompts >= 2
    assert found["q4_k_m"].bytes < exact.bytes / 3

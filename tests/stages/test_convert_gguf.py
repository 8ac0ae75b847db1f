"""The stage that writes GGUF files: what it needs is said before anything runs; with llama.cpp
here, that it serves what was merged.
"""

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.workflow_project import Project, make_project
from workflow.lib.artifacts.gguf_record import GgufChecks, GgufFile
from workflow.lib.artifacts.manifest_record import Probe
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.evaluation.gguf_checks import Reference, check_prompts, compared
from workflow.lib.settings.config import load_config
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.scripts.convert_gguf import main

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")  # a checkout of llama.cpp
# Folders of a merged model whose tokenizer llama.cpp knows, and of tokens made with it.
MERGED, TOKENS = (os.environ.get(f"LLAMA_CPP_{name}", "") for name in ("MERGED", "TOKENS"))


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ({"gguf": ["q8_0"]}, r"export: gguf = q8_0: it is made of the merged model"),
        ({"gguf": ["q8_0"], "merged": True}, r"Set llama_cpp to a checkout of llama\.cpp"),
        ({"gguf": ["q4_k_m"], "merged": True}, r"entry 1 must be 'f32', 'f16', 'bf16' or 'q8_0'"),
    ],
)
def test_what_it_needs_is_said_with_the_settings(export: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config({"export": export})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path / "project")
    (made.root / "llama.cpp").mkdir()
    made.edit({"export": {"merged": True, "gguf": ["bf16"], "llama_cpp": "llama.cpp"}})
    return made


def test_folder_without_the_converter_is_refused_before_anything_runs(project: Project) -> None:
    done = project.snakemake("--dry-run", "all")
    assert done.status == 1
    assert f"export.llama_cpp = 'llama.cpp/{CONVERTER}' (run demo): there is no" in done.output


def test_files_are_planned_after_the_merged_model(project: Project) -> None:
    (project.root / "llama.cpp" / CONVERTER).write_text("")
    assert project.planned("train")["convert_gguf"] == 1


class Server:
    """What a server of llama.cpp answers, of the one document of `EXPECTED`."""

    def __init__(self, log_p: float = -0.5) -> None:
        self.log_p = log_p

    def text_ids(self, text: str) -> list[int]:
        return [len(text)]

    def log_probability(
        self, prompt: list[int], target: int, *, vocab_size: int
    ) -> tuple[float, int]:
        return self.log_p, target

    def answer(self, prompt: list[int], *, max_new_tokens: int) -> list[int]:
        return [7, 2, 9]


EXPECTED = Reference(
    positions=[([1], 5, -0.5, 5), ([1, 5], 6, -0.5, 4)], prompts=[], answers=[], stop_ids=[2]
)


def compare(log_p: float, path: Path) -> GgufFile:
    path.write_bytes(b"GGUF")
    server: Any = Server(log_p)
    return compared(server, path, EXPECTED, format_name="q8_0", vocab_size=11)


def test_loss_within_the_bound_is_recorded(tmp_path: Path) -> None:
    found = compare(-0.52, tmp_path / "x.gguf")
    assert (found.loss, found.reference_loss, found.bytes) == (0.52, 0.5, 4)
    assert found.same_most_likely == 0.5


@pytest.mark.parametrize("log_p", [-0.56, -0.44, float("nan")])
def test_loss_beyond_the_bound_is_refused(tmp_path: Path, log_p: float) -> None:
    with pytest.raises(UserError, match=r"export\.gguf = q8_0: .* may differ by 0\.03"):
        compare(log_p, tmp_path / "x.gguf")


def test_prompt_with_other_ids_is_refused() -> None:
    server: Any = Server()

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return str(ids)

    tokenizer: Any = Tokenizer()
    assert check_prompts(server, tokenizer, [Probe(text="abc", ids=[3])]) == 1
    with pytest.raises(UserError, match=r"llama\.cpp writes a text as '\[3\]', and Transformers"):
        check_prompts(server, tokenizer, [Probe(text="abc", ids=[4])])


@pytest.mark.skipif(
    not (LLAMA_CPP and MERGED and TOKENS and importlib.util.find_spec("xllamacpp")),
    reason="needs LLAMA_CPP, LLAMA_CPP_MERGED, LLAMA_CPP_TOKENS and xllamacpp",
)
def test_llama_cpp_serves_what_was_merged(tmp_path: Path) -> None:
    export = {"merged": True, "gguf": ["bf16", "q8_0"], "llama_cpp": LLAMA_CPP}
    main(
        argparse.Namespace(
            config={"export": export},
            run="demo",
            merged=Path(MERGED),
            tokens=Path(TOKENS),
            output=tmp_path / "gguf",
        )
    )
    checks = read_record(tmp_path / "gguf" / "gguf.json", GgufChecks)
    assert list(checks.files) == ["bf16", "q8_0"]
    assert checks.prompts >= 2
    assert checks.files["bf16"].same_most_likely > 0.9
    assert (tmp_path / "gguf" / "Modelfile").read_text().startswith("FROM ./demo-bf16.gguf\n")

"""A real run of the real Snakefile on a base in 16 bits (`quantize.method: none`): a mixture of
experts, through every stage."""

import shutil

import pytest

from tests.support.mixtures import tiny_mixture
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.workflow_project import make_project
from workflow.lib.system.files import read_checked_json

SUBJECTS = ["original", "base", "tuned", "tuned_on_original", "merged"]


def test_base_in_16_bits_loses_nothing(tmp_path):
    """The base has the loss of its original, and the adapter the same loss on both: what a server
    computes with the original is what was trained."""
    project = make_project(
        tmp_path,
        quantize={"method": "none"},
        export={"merged": True},
        evaluate={"subjects": SUBJECTS, "served": "merged"},
    )
    shutil.rmtree(tmp_path / "model")
    tiny_mixture("qwen3_moe", tmp_path / "model", vocab_size=VOCAB_SIZE)
    tiny_tokenizer(tmp_path / "model")
    done = project.snakemake("all")
    assert done.status == 0, done.output
    run = tmp_path / "results" / "runs" / "demo"
    losses = {
        name: read_checked_json(run / "evaluate_run" / f"{name}.json")["heldout"]["loss"]
        for name in SUBJECTS
    }
    assert losses["base"] == pytest.approx(losses["original"], rel=1e-6)
    assert losses["tuned"] == pytest.approx(losses["tuned_on_original"], rel=1e-6)
    assert losses["tuned"] != pytest.approx(losses["base"], rel=1e-4)
    assert losses["merged"] == pytest.approx(losses["tuned"], rel=1e-2)  # rounded to bf16
    (record,) = (tmp_path / "results" / "base").glob("*/quantization.json")
    assert read_checked_json(record)["quantized_parameters"] == 0

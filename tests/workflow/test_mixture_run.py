"""A real run of the real Snakefile on a mixture of experts that is published in FP8: every stage,
and every form of the model measured."""

import shutil

from tests.support.mixtures import SIZES
from tests.support.packed_checkpoints import fp8_checkpoint
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.workflow_project import make_project
from workflow.lib.system.files import read_checked_json, read_json

SUBJECTS = ["original", "base", "tuned", "tuned_on_original", "merged"]


def test_mixture_goes_through_all_stages(tmp_path):
    project = make_project(
        tmp_path, export={"merged": True}, evaluate={"subjects": SUBJECTS, "served": "merged"}
    )
    shutil.rmtree(tmp_path / "model")
    fp8_checkpoint(tmp_path / "model", block_size=(16, 8), vocab_size=VOCAB_SIZE)
    tiny_tokenizer(tmp_path / "model")
    done = project.snakemake("all")
    assert done.status == 0, done.output
    run = tmp_path / "results" / "runs" / "demo"
    assert {path.stem for path in (run / "evaluate_run").glob("[a-z]*.json")} == {
        *SUBJECTS,
        "items",
    }
    parity = read_checked_json(run / "consolidate" / "parity.json")
    assert parity["passed"]
    assert parity["adapter_effect"] > 100 * parity["rms_difference"]
    (record,) = (tmp_path / "results" / "base").glob("*/quantization.json")
    assert read_json(record)["quantized_stacks"] == 2 * SIZES["num_hidden_layers"]
    assert (tmp_path / "results" / "report" / "report.html").is_file()

"""A real run of the real Snakefile on a checkpoint with a vision tower, whose text is trained."""

import shutil

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.families import tiny_family
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.workflow_project import executed, make_project
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.system.files import read_json

PROCESSOR = "preprocessor_config.json"
SUBJECTS = ["original", "base", "tuned", "tuned_on_original", "merged"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The project after all stages; never change it."""
    project = make_project(
        tmp_path_factory.mktemp("multimodal") / "project",
        export={"merged": True},
        evaluate={"subjects": SUBJECTS, "served": "merged"},
    )
    shutil.rmtree(project.root / "model")
    tiny_family("mistral3", project.root / "model", vocab_size=VOCAB_SIZE)
    (project.root / "model" / PROCESSOR).write_text('{"size": 28}')
    tiny_tokenizer(project.root / "model")
    project.run("all")
    return project


def test_merged_model_is_the_measured_one_with_its_vision_tower(finished):
    assert_merged_is_measured(finished.root)


def test_merged_model_is_the_one_that_two_processes_measure_together(finished, tmp_path):
    project = finished.copy(tmp_path / "project")
    project.edit({"evaluate": {"processes": 2, "shard": True}})
    shutil.rmtree(project.folder("evaluate_run"))
    made = executed(project.run("all").output)
    assert made["evaluate_run"] == 1
    assert made["finetune"] == 0
    assert_merged_is_measured(project.root)


def assert_merged_is_measured(root):
    """Assert that stock Transformers finds the losses that were measured, and the vision tower as
    it was."""
    run = root / "results" / "runs" / "demo"
    results = {name: read_json(run / "evaluate_run" / f"{name}.json") for name in SUBJECTS}
    losses = {name: result["heldout"]["loss"] for name, result in results.items()}
    assert losses["merged"] < losses["original"] - 0.01
    merged = run / "consolidate" / "merged"
    with CheckpointReader(root / "model") as before, CheckpointReader(merged) as after:
        assert {*before.names()} == {*after.names()}
        seeing = [name for name in before.names() if "vision" in name or "projector" in name]
        assert len(seeing) > 10
        for name in seeing:
            assert torch.equal(before.tensor(name), after.tensor(name)), name
            assert before.dtype(name) == after.dtype(name), name
    assert (merged / PROCESSOR).read_bytes() == (root / "model" / PROCESSOR).read_bytes()
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    (tokens,) = (root / "results" / "tokens").glob("qa-*")
    documents = TokenStore.open(tokens).heldout_documents()
    for measured in results["merged"]["heldout"]["per_document"]:
        tokens_of, trained = documents[measured["document"]]
        ids = torch.tensor(tokens_of.astype(int))[None]
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        mask = torch.tensor(trained[1:])
        loss = -log_p.gather(1, ids[0, 1:, None])[mask].sum().item()
        assert loss == pytest.approx(measured["loss_sum"], rel=1e-4)

"""A real run of the real Snakefile on a checkpoint with a vision tower, whose text is trained."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.families import tiny_family
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.workflow_project import make_project
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.files import read_json

SUBJECTS = ["original", "base", "tuned", "tuned_on_original", "merged"]


@pytest.mark.parametrize("sharded", [False, True])
def test_merged_model_is_the_measured_one_with_its_vision_tower(
    tmp_path: Path, sharded: bool
) -> None:
    evaluate = {"subjects": SUBJECTS, "served": "merged"}
    evaluate |= {"processes": 2, "shard": True} if sharded else {}
    project = make_project(tmp_path, export={"merged": True}, evaluate=evaluate)
    shutil.rmtree(tmp_path / "model")
    tiny_family("gemma3", tmp_path / "model", vocab_size=VOCAB_SIZE)
    tiny_tokenizer(tmp_path / "model")
    done = project.snakemake("all")
    assert done.status == 0, done.output
    run = tmp_path / "results" / "runs" / "demo"
    results = {name: read_json(run / "evaluate_run" / f"{name}.json") for name in SUBJECTS}
    losses = {name: result["heldout"]["loss"] for name, result in results.items()}
    assert losses["merged"] < losses["original"] - 0.01
    merged = run / "consolidate" / "merged"
    with CheckpointReader(tmp_path / "model") as before, CheckpointReader(merged) as after:
        assert {*before.names()} == {*after.names()}
        seeing = [name for name in before.names() if "vision" in name or "projector" in name]
        assert len(seeing) > 10
        for name in seeing:
            assert torch.equal(before.tensor(name).bfloat16(), after.tensor(name)), name
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    (tokens,) = (tmp_path / "results" / "tokens").glob("qa-*")
    documents = TokenStore.open(tokens).heldout_documents()
    for measured in results["merged"]["heldout"]["per_document"]:
        tokens_of, trained = documents[measured["document"]]
        ids = torch.tensor(tokens_of.astype(int))[None]
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        mask = torch.tensor(trained[1:])
        loss = -log_p.gather(1, ids[0, 1:, None])[mask].sum().item()
        assert loss == pytest.approx(measured["loss_sum"], rel=1e-4)

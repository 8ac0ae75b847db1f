import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.rounding import allowed, lost
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.tiny_export import random_documents, tiny_adapter, tiny_base, tiny_tokens
from tests.system.test_checksums import flip
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.scores.store import ScoreStore, read_manifest
from workflow.lib.system.files import write_checksums

DATA = (".npy", ".safetensors")
HELDOUT, TRAINED = random_documents(5), random_documents(3, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_adapter(tiny_base(folder / "base"), folder / "adapter")
    tiny_tokenizer(folder / "base-original")
    for name in ("base", "adapter"):
        write_checksums(folder / name)
    tiny_tokens(folder / "tokens", HELDOUT, rows=TRAINED)
    return folder


def score(folder: Path, output: Path, top_k: int = 0, **options: object):
    """Run the stage on the adapter, or on what the options say."""
    given: dict[str, Any] = {"base": folder / "base", "model": folder / "adapter"}
    given |= {"tokens": folder / "tokens", "tokenizer": folder / "base-original"}
    scored = {"setting": "preferences.reference", "named": "a-run", "top_k": top_k}
    given |= {"output": output, "config": {"model": {}, "scored": scored}} | options
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return forked_stage("score_tokens", environment=environment, **given)


def refused(folder: Path, output: Path, **options: Any) -> str:
    return refusal_of(score(folder, output, **options), output=output)


def log_probs(folder: Path, scores: Path, *, top_k: int = 0) -> torch.Tensor:
    """Return the log-probabilities of training rows, then of held-out documents."""
    store = ScoreStore.open(scores, tokens=TokenStore.open(folder / "tokens"), top_k=top_k)
    heldout = [store.heldout(number) for number in range(len(HELDOUT))]
    parts = [store.for_rows(range(len(TRAINED))), *heldout]
    return torch.from_numpy(np.concatenate([part.log_probs for part in parts]))


@torch.no_grad()
def stock(model: torch.nn.Module) -> torch.Tensor:
    found = []
    for ids, mask in [*TRAINED, *HELDOUT]:
        row = torch.from_numpy(ids.astype(np.int64))
        shown = model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        places = torch.from_numpy(np.flatnonzero(mask))
        found.append(shown[places - 1, row[places]])
    return torch.cat(found)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("output")
    return score(folder, output / "scores", log=output / "log"), output


def test_adapter_on_its_base_has_the_scores_of_stock_packages(folder, finished):
    process, output = finished
    assert process.returncode == 0, process.stderr
    base = AutoModelForCausalLM.from_pretrained(folder / "base", device_map="cpu")
    expected = stock(PeftModel.from_pretrained(base.dequantize(), folder / "adapter"))
    assert lost(log_probs(folder, output / "scores"), expected) <= allowed([])


def test_manifest_says_what_was_scored_and_log_what_came_out(finished):
    manifest = read_manifest(finished[1] / "scores")
    assert (manifest.model, manifest.way, manifest.top_k) == ("a-run", "whole", 0)
    assert manifest.provenance.stage == "score_tokens"
    log = (finished[1] / "log").read_text()
    assert "2 of 2 shards to score, by 1 process(es)" in log
    assert f"mean log-probability in training rows: {manifest.mean_log_prob:.4f}" in log


def test_two_processes_that_share_the_weights_give_the_same_scores(folder, finished, tmp_path):
    process = score(folder, tmp_path / "scores", way="sharded", processes=2)
    assert process.returncode == 0, process.stderr
    expected = log_probs(folder, finished[1] / "scores")
    assert lost(log_probs(folder, tmp_path / "scores"), expected) <= allowed([])


def test_original_read_layer_by_layer_is_a_teacher(folder, tmp_path):
    original = folder / "base-original"
    process = score(folder, tmp_path / "scores", model=original, way="streamed", top_k=4)
    assert process.returncode == 0, process.stderr
    expected = stock(AutoModelForCausalLM.from_pretrained(original))
    found = log_probs(folder, tmp_path / "scores", top_k=4)
    assert lost(found, expected) <= allowed([])


def test_more_tokens_than_the_vocabulary_are_refused(folder, tmp_path):
    said = refused(folder, tmp_path / "scores", top_k=VOCAB_SIZE + 1)
    assert f"distill.top_k = {VOCAB_SIZE + 1}: the vocabulary has {VOCAB_SIZE} tokens" in said


def test_model_of_another_tokenizer_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    tokenizer = tiny_tokenizer(other)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(other)
    (other / "config.json").write_bytes((folder / "base-original" / "config.json").read_bytes())
    said = refused(folder, tmp_path / "scores", tokenizer=other)
    assert "preferences.reference = 'a-run': its tokenizer has other tokens" in said


@pytest.mark.parametrize("damage", ["base", "adapter", "tokens"])
def test_damaged_input_is_refused(folder, tmp_path, damage):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / damage).unlink()
    (copy / damage).mkdir()
    for path in (folder / damage).iterdir():
        (copy / damage / path.name).write_bytes(path.read_bytes())
    flip(next(path for path in (copy / damage).iterdir() if path.suffix in DATA), -4)
    assert "is damaged" in refused(copy, tmp_path / "scores")

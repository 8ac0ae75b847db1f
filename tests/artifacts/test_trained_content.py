"""Edits in place of what a training reads: which of them count as another training."""

import pytest

from workflow.lib.artifacts.trained_content import input_digests, trained_content
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.system.files import file_sha256, provenance, write_checked_json, write_checksums

FILES = {
    "training tokens": "tokens/train.input_ids.npy",
    "held-out tokens": "tokens/heldout.loss_mask.npy",
    "base": "base/model.safetensors",
    "start adapter": f"start/{ADAPTER_WEIGHTS}",
    "scores of training tokens": "scores/train-00000.log_probs.npy",
    "scores of held-out tokens": "scores/heldout-00000.log_probs.npy",
}


def inputs(folder, *, edited=None):
    """Write inputs of a training with their records; return the arguments of their digests."""
    for name, file in FILES.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("edited" if name == edited else "as it was")
    write_checksums(folder / "base")
    tokens, scores = folder / "tokens", folder / "scores"
    files = {path.name: file_sha256(path) for path in sorted(tokens.glob("*.npy"))}
    write_checked_json(tokens / "manifest.json", {"files": files})
    shards = [
        {"split": split, "first": 0, "count": 1, "tokens": 1}
        | {"files": {"log_probs": file_sha256(scores / f"{split}-00000.log_probs.npy")}}
        for split in ("train", "heldout")
    ]
    facts = {"format_version": 1, "model": "m", "model_files": {}, "tokens": "t", "top_k": 0}
    facts |= {"way": "whole", "device": "cpu", "compute_dtype": "float32", "mean_log_prob": None}
    facts |= {"shards": shards, "provenance": provenance()}
    write_checked_json(scores / "manifest.json", facts)
    paths = {"manifest": tokens / "manifest.json", "base": folder / "base"}
    return paths | {"start": folder / "start", "scores": scores}


@pytest.mark.parametrize("chooses", [False, True], ids=["last", "chosen by held-out losses"])
@pytest.mark.parametrize("edited", FILES)
def test_edit_counts_as_another_training_if_it_decides_the_adapter(tmp_path, edited, chooses):
    kwargs = {"chooses_by_heldout": chooses}
    before = input_digests(**inputs(tmp_path), **kwargs)
    key = trained_content(**inputs(tmp_path), **kwargs)
    arguments = inputs(tmp_path, edited=edited)
    after = input_digests(**arguments, **kwargs)
    decides = chooses or "held-out" not in edited
    assert after.changed(before.deciding | before.measuring) == ([edited] if decides else [])
    assert after.measured_otherwise(before.deciding | before.measuring) is not decides
    assert (trained_content(**arguments, **kwargs) != key) is decides

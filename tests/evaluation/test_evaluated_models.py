"""Models that are the same are measured once."""

import pytest
import torch

from tests.support.forked_stage import forked_stage
from tests.support.models import tiny_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.evaluation.evaluated_models import source_files, subjects
from workflow.lib.export.stock_models import load_options
from workflow.lib.settings.config import ModelConfig


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    tiny_llama(folder, dtype=torch.bfloat16)
    tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("method", "copies"), [("none", 1), ("absmax", 2)])
def test_base_in_16_bits_and_its_original_are_one_model(original, tmp_path, method, copies):
    done = forked_stage(
        "quantize_base",
        config={"quantize": {"method": method}},
        model=original,
        output=tmp_path / "base",
        log=tmp_path / "log.txt",
    )
    assert done.returncode == 0, done.stderr
    device = torch.device("cpu")
    options = load_options(Checkpoint(original), device=device, settings=ModelConfig())
    measured = subjects(
        ["original", "base"],
        {"model": original, "base": tmp_path / "base", "adapter": tmp_path / "adapter"},
        options=options,
        sources=source_files(original),
    )
    assert [subject.name for subject in measured] == ["original", "base"]
    assert len({subject.key for subject in measured}) == copies
    assert len({subject.opened.func for subject in measured}) == copies, "copies in memory"

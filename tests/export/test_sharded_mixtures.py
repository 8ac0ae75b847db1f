"""A mixture whose weights two processes share computes what its stock reload does in one."""

import pytest
import torch

from tests.export.test_mixtures import IDS, exported, logits, stock
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.world import process_group
from workflow.lib.export.sharded_models import load_sharded_adapter, load_sharded_base
from workflow.lib.export.stock_models import load_adapter


def share(folder):
    """Return the logits of the sharded models."""
    options = {"compute_dtype": torch.float32, "attention": "eager"}
    found = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        original = load_sharded_base(Checkpoint(folder / "model"), world=world, **options)
        found["original"] = original(IDS).logits
        for base in ("nf4", "model"):
            tuned = load_sharded_adapter(
                Checkpoint(folder / base), Adapter(folder / "adapter"), world=world, **options
            )
            found[base] = tuned.get_base_model()(IDS).logits
    return found


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_shared_mixture_computes_what_the_stock_reload_does(tmp_path, family):
    tiny_mixture(family, tmp_path / "model")
    quantized(tmp_path / "model", tmp_path / "nf4")
    exported(tmp_path, tmp_path / "adapter")
    for found in run_distributed(share, tmp_path, world_size=2):
        expected = logits(stock(tmp_path / "model"))
        torch.testing.assert_close(found["original"], expected, rtol=1e-4, atol=1e-4)
        for base in ("nf4", "model"):
            expected = logits(load_adapter(stock(tmp_path / base), Adapter(tmp_path / "adapter")))
            torch.testing.assert_close(found[base], expected, rtol=1e-4, atol=2e-4)

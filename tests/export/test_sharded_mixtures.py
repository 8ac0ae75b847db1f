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
from workflow.lib.system.errors import UserError


def share(folder):
    """Return the logits of the sharded models, and what is said of one that cannot be."""
    options = {"compute_dtype": torch.float32, "attention": "eager"}
    found = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        original = load_sharded_base(Checkpoint(folder / "model"), world=world, **options)
        found["original"] = original(IDS).logits
        tuned = load_sharded_adapter(
            Checkpoint(folder / "nf4"), Adapter(folder / "adapter"), world=world, **options
        )
        found["tuned"] = tuned.get_base_model()(IDS).logits
        with pytest.raises(UserError) as caught:
            load_sharded_adapter(
                Checkpoint(folder / "model"), Adapter(folder / "adapter"), world=world, **options
            )
    return found, str(caught.value)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_shared_mixture_computes_what_the_stock_reload_does(tmp_path, family):
    tiny_mixture(family, tmp_path / "model")
    quantized(tmp_path / "model", tmp_path / "nf4")
    exported(tmp_path, tmp_path / "adapter")
    for found, message in run_distributed(share, tmp_path, world_size=2):
        expected = logits(stock(tmp_path / "model"))
        torch.testing.assert_close(found["original"], expected, rtol=1e-4, atol=1e-4)
        expected = logits(load_adapter(stock(tmp_path / "nf4"), Adapter(tmp_path / "adapter")))
        torch.testing.assert_close(found["tuned"], expected, rtol=1e-4, atol=2e-4)
        assert "on the NF4 base alone. Leave tuned_on_original out" in message

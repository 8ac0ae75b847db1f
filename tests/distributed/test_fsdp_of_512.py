"""The sharding of 405B over 512 simulated processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from workflow.lib.distributed.fsdp import shard_
from workflow.lib.model.architecture.shipped_shapes import known_config
from workflow.lib.model.host_embedding import empty_table_
from workflow.lib.model.layers.nf4_linear import NF4Linear, NF4Spec
from workflow.lib.model.lora import inject_adapters
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import LoraSettings

MODEL = "meta-llama/Llama-3.1-405B-Instruct"


@contextmanager
def fake_group(*, rank: int, size: int) -> Iterator[None]:
    """Be one rank of a process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_405b(*, layers: int) -> CausalLMForTraining:
    """Build the training module of Llama 3.1 405B, or of its first layers, on meta, as
    `build.build_training_model` does."""
    config = LlamaConfig.from_dict(known_config(MODEL) | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for path, linear in list(layer.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                spec = NF4Spec((linear.out_features, linear.in_features), 64, True, 0.0)
                parent, _, name = path.rpartition(".")
                packed = NF4Linear(spec, bias=False, compute_dtype=torch.bfloat16)
                setattr(layer.get_submodule(parent), name, packed)
    model.requires_grad_(False)
    empty_table_(model)
    return CausalLMForTraining(inject_adapters(model, LoraSettings(r=16)))


def held(training: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of every parameter that this rank holds."""
    return {name: local(p).numel() * p.element_size() for name, p in training.named_parameters()}


def sharded(*, rank: int, shards: int, layers: int) -> dict[str, int]:
    """Return what one of 512 ranks holds of 405B, of which each `shards` share a copy."""
    with fake_group(rank=rank, size=512):
        names = ("replica", "shard")
        mesh = init_device_mesh("cpu", (512 // shards, shards), mesh_dim_names=names)
        training = build_405b(layers=layers)
        units = shard_(
            training, mesh["shard"] if shards == 512 else mesh, reshard_after_forward=True
        )
        assert len(units) == layers + 1
        return held(training)


def test_last_of_512_ranks_holds_no_more_than_the_first() -> None:
    first, last = (sharded(rank=rank, shards=512, layers=2) for rank in (0, 511))
    assert first.keys() == last.keys()
    assert all(last[name] <= first[name] for name in first)
    norms = [name for name in first if name.endswith("norm.weight")]
    assert {first[name] for name in norms} == {16384 // 512 * 2}

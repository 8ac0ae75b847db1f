"""Many GPUs: traffic by hand and against measurements, and the sharding of 405B over 512 simulated
processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.preflight_examples import llama_70b, setup
from workflow.lib.distributed.fsdp import shard_
from workflow.lib.model.architecture.shipped_shapes import known_config
from workflow.lib.model.host_embedding import empty_table_
from workflow.lib.model.layers.nf4_linear import NF4Linear, NF4Spec
from workflow.lib.model.lora import inject_adapters
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.planning.memory.terms import stored_terms
from workflow.lib.planning.timing.gpu_traffic import Fabric, micro_batch_traffic, ring_seconds
from workflow.lib.planning.timing.many_gpus import (
    DOCUMENT,
    ETHERNET_100,
    EXAMPLE_MODEL,
    FABRICS,
    INFINIBAND,
    document,
    example_setup,
    example_shape,
    predict_step,
)
from workflow.lib.planning.timing.step_time import gpu_parts
from workflow.lib.planning.timing.step_work import micro_batch_work
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.gpu_models import BY_NAME

ROUND = Fabric("made up", gpus_per_node=4, local=8e9, network=2e9)
# Of the model's 2,144 tensors a rank, each is rounded up to 512 bytes in memory.
ROUNDING_SHARE = 0.02


def test_ring_inside_a_node_by_hand() -> None:
    # 4 GPUs: each receives 3/4 of 8 GB at 80% of 8 GB/s, in 3 hops
    assert ring_seconds(8e9, ROUND, processes=4) == pytest.approx(6 / 6.4 + 3 * 2e-6)


def test_ring_over_nodes_waits_for_the_slower_of_link_and_network() -> None:
    # 3 nodes of 4: each node receives 2/3 of 6 GB at 80% of 2 GB/s; 9 hops inside, 3 between
    assert ring_seconds(6e9, ROUND, processes=12) == pytest.approx(4 / 1.6 + 9 * 2e-6 + 3 * 1e-5)


def test_rings_over_replicas_share_the_network_of_a_node() -> None:
    # one GPU of each of 3 nodes; the 4 rings of the 4 GPUs at once
    assert ring_seconds(6e9, ROUND, processes=3, stride=4) == pytest.approx(4 * 4 / 1.6 + 3 * 1e-5)


def test_one_process_waits_for_nothing() -> None:
    step = predict_step(llama_70b(), setup(processes=1), BY_NAME["NVIDIA H200"], ETHERNET_100)
    assert step.step_s == step.compute_s
    assert step.efficiency == 1.0


def test_weights_kept_after_forward_are_gathered_once() -> None:
    kept = setup(processes=16, reshard_after_forward=False)
    freed = replace(kept, reshard_after_forward=True)
    once, twice = (
        micro_batch_traffic(llama_70b(), chosen, ETHERNET_100).beside_s for chosen in (kept, freed)
    )
    assert 1.7 < twice / once < 2, "adapters and tables travel once either way"


def example_update_s(processes: int) -> float:
    shape = example_shape()
    chosen = example_setup(shape, processes=processes, shards=processes)
    work = micro_batch_work(shape, chosen, trained_share=1.0)
    return gpu_parts(work, BY_NAME["NVIDIA H200"])["update"]


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.name)
def test_more_nodes_never_make_a_step_shorter(fabric: Fabric) -> None:
    shape = example_shape()
    counts = [8, 16, 64, 512]
    steps = [
        predict_step(
            shape, example_setup(shape, processes=n, shards=n), BY_NAME["NVIDIA H200"], fabric
        )
        for n in counts
    ]
    updates = [example_update_s(n) for n in counts]  # shards shrink, and with them the update
    rest = [step.step_s - update_s for step, update_s in zip(steps, updates, strict=True)]
    assert rest == sorted(rest)


def test_replicas_pay_off_on_a_slow_network_and_only_there() -> None:
    shape = example_shape()
    sharded, replicated = (
        example_setup(shape, processes=512, shards=shards) for shards in (512, 8)
    )

    def efficiencies(fabric: Fabric) -> list[float]:
        return [
            predict_step(shape, chosen, BY_NAME["NVIDIA H200"], fabric).efficiency
            for chosen in (sharded, replicated)
        ]

    slow, fast = efficiencies(ETHERNET_100), efficiencies(INFINIBAND)
    assert slow[1] > 2 * slow[0]
    assert fast[1] == pytest.approx(fast[0], rel=0.02)


def test_document_is_what_the_model_predicts_now() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()


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
    `build.build_training_model` does.
    """
    config = LlamaConfig.from_dict(known_config(EXAMPLE_MODEL) | {"num_hidden_layers": layers})
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


@pytest.mark.parametrize(("shards", "layers"), [(512, 9), (8, 3)])
def test_first_of_512_ranks_holds_of_405b_what_the_memory_model_counts(
    shards: int, layers: int
) -> None:
    shape = replace(example_shape(), order=(0,) * layers)
    terms = stored_terms(shape, example_setup(shape, processes=512, shards=shards))
    parameters = (
        "nf4_weights",
        "nf4_scales",
        "embedding_and_head",
        "norms_and_biases",
        "lora_weights",
    )
    counted = sum(terms[name] for name in parameters)
    found = sum(sharded(rank=0, shards=shards, layers=layers).values())
    assert found == pytest.approx(counted, rel=ROUNDING_SHARE)


def test_last_of_512_ranks_holds_no_more_than_the_first() -> None:
    first, last = (sharded(rank=rank, shards=512, layers=2) for rank in (0, 511))
    assert first.keys() == last.keys()
    assert all(last[name] <= first[name] for name in first)
    norms = [name for name in first if name.endswith("norm.weight")]
    assert {first[name] for name in norms} == {16384 // 512 * 2}

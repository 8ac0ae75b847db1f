"""The terms of layers that are not plain: what autograd keeps of them on the CPU, and stacks of
experts by hand.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.families import FAMILIES, RECURRENT, tiny_family
from tests.support.models import adapted, quantized
from tests.support.other_decoders import config_of
from tests.support.preflight_examples import setup, token_counts
from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.disk import disk_bytes
from workflow.lib.planning.memory.terms import (
    dequantized_weight,
    layer_tensors,
    saved_activations,
    stored_terms,
    trainable_parameters,
)
from workflow.lib.step_plan.plan import StepPlan

ROWS, SEQ_LEN = 2, 128


def described(family: str, **changes: object) -> ModelShape:
    return describe_config(config_of(family) | changes, origin=Path("config.json"))


def on_cpu(shape: ModelShape) -> StepPlan:
    names = tuple(name for name in shape.linear_names)
    return setup(
        processes=1, micro_batch_size=ROWS, seq_len=SEQ_LEN, rank=4, targets=names,
        compute_dtype="float32", attention="sdpa", activation_checkpointing=False,
    )  # fmt: skip


def kept_by_autograd(base: Path) -> list[int]:
    """Bytes that autograd keeps of each decoder layer of the engine's model in fp32, weights and
    what all layers share left out.
    """
    model = adapted(base, r=4, alpha=8, fused_layers=True).train().peft_model
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: list[dict[int, torch.UntypedStorage]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if kept and storage.data_ptr() not in known:
            kept[-1][storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    def begin(_: torch.nn.Module, args: tuple[torch.Tensor, ...], named: dict[str, object]) -> None:
        kept.append({})
        parts = [x for value in named.values() for x in (value if isinstance(value, tuple) else [])]
        known.update(x.untyped_storage().data_ptr() for x in parts if isinstance(x, torch.Tensor))

    for layer in decoder_layers(model.get_base_model()):  # type: ignore[operator]
        layer.register_forward_pre_hook(begin, with_kwargs=True)
    ids = torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return [sum(x.nbytes() for x in storages.values()) for storages in kept]


@pytest.mark.parametrize("family", RECURRENT)
def test_layer_keeps_no_more_than_is_estimated_and_not_much_less(
    family: str, tmp_path: Path
) -> None:
    shape = describe_config(FAMILIES[family].config(family).to_dict(), origin=tmp_path)
    base = quantized(tiny_family(family, tmp_path / "original"), tmp_path / "base")
    kept = kept_by_autograd(base)
    estimates = [saved_activations(shape.layer(n), on_cpu(shape)) for n in range(shape.num_layers)]
    for number, (measured, estimated) in enumerate(zip(kept, estimates, strict=True)):
        if not shape.layer(number).plain:
            assert measured <= estimated <= 2.5 * measured, (number, measured, estimated)


def mixture() -> tuple[ModelShape, DecoderLayer]:
    """Qwen3-30B-A3B's layer: 128 experts of width 768, of which a token takes 8; hidden 2,048."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    more = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    shape = described("qwen3_moe", moe_intermediate_size=768, **sizes, **more)
    return shape, shape.kinds[0]


def test_experts_are_stored_packed_and_cut_over_processes() -> None:
    """128 x 1,536 x 2,048 and 128 x 2,048 x 768 weights, half a byte each; 1 byte per 64."""
    shape, _ = mixture()
    weights = 128 * (1536 * 2048 + 2048 * 768) + 2 * 2048 * 4096 + 2 * 2048 * 512
    for processes in (1, 4):
        stored = stored_terms(shape, setup(processes=processes, targets=()))
        packed = stored["nf4_weights"] + stored["nf4_scales"]
        assert packed == pytest.approx(2 * weights * (1 / 2 + 1 / 64) / processes, rel=1e-3)


def test_adapter_of_a_stack_has_a_and_b_of_every_expert() -> None:
    """A (128 r, in) and B (out of one expert, 128 r), cut along dim 0."""
    _, layer = mixture()
    chosen = setup(rank=16, targets=("gate_up_proj",))
    tensors = layer_tensors(layer, chosen).by_term["lora_weights"]
    assert tensors == [(128 * 16, 4 * 2048), (1536, 4 * 16 * 128)]


def test_router_is_sharded_by_expert() -> None:
    _, layer = mixture()
    tensors = layer_tensors(layer, setup()).by_term["norms_and_biases"]
    assert (128, 2 * 2048) in tensors


def test_trained_router_is_a_master_beside_the_adapters() -> None:
    shape, layer = mixture()
    chosen = setup(targets=(), routers=("mlp.gate",))
    tensors = layer_tensors(layer, chosen).by_term
    assert tensors["lora_weights"] == [(128, 4 * 2048)]
    assert (128, 2 * 2048) not in tensors["norms_and_biases"]
    assert trainable_parameters(shape, chosen) == shape.num_layers * 128 * 2048
    moments = [stored_terms(shape, x)["adam_moments"] for x in (setup(targets=()), chosen)]
    assert moments == [0, 2 * shape.num_layers * 4 * 128 * 2048 // 2]  # two processes


def test_experts_are_decoded_in_slices() -> None:
    """512 MiB of gate and up, which are 768 MiB; and one absmax in fp32 of 64 weights."""
    _, layer = mixture()
    assert dequantized_weight(layer, setup()) == 2**29 + 4 * 128 * 1536 * 2048 // 64
    few = replace(layer, linears=tuple(x for x in layer.linears if x.experts == 1))
    assert dequantized_weight(few, setup()) == 2 * 2048 * 4096 + 4 * 2048 * 4096 // 64


def test_adapters_of_experts_keep_a_value_for_each_row_that_they_multiply() -> None:
    _, layer = mixture()
    kept = [
        saved_activations(layer, setup(rank=16, targets=targets, attention="varlen"))
        for targets in ((), ("gate_up_proj",), ("q_proj",))
    ]
    assert [kept[1] - kept[0], kept[2] - kept[0]] == [2 * 2048 * 8 * 16, 2 * 2048 * 16]


def test_mask_repeats_the_key_heads_of_other_layers_too() -> None:
    """28 heads of keys and of values more, and a mask in 16 bits."""
    _, layer = mixture()
    flash, sdpa = (saved_activations(layer, setup(attention=x)) for x in ("flash", "sdpa"))
    assert sdpa - flash == 2 * 2048 * 28 * 2 * 128 + 2 * 2048**2


def test_memory_and_disk_of_a_mixture_are_those_of_all_its_experts() -> None:
    shape, layer = mixture()
    chosen = setup(targets=("q_proj", "down_proj"))
    disk = disk_bytes(shape, chosen, token_counts(), keep_checkpoints=1, keep_best=False)
    packed = 2 * layer.num_weights * (0.5 + 1 / 64)
    assert disk["base"] == pytest.approx(packed + 2 * shape.plain_weights, rel=0.01)
    trained = 2 * 16 * (2048 + 4096 + 128 * (768 + 2048))
    assert disk["adapter"] == 2 * 4 * trained
    peak = predict(shape, chosen).peak_bytes
    assert peak > stored_terms(shape, chosen)["nf4_weights"] + dequantized_weight(layer, chosen)

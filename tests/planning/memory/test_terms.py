"""Terms of the memory of a step, by hand: what is stored, saved for backward, or on the host."""

from dataclasses import replace

import pytest

from tests.support.memory_examples import tiny
from tests.support.preflight_examples import llama_70b, setup
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.layer_tensors import gathered_bytes
from workflow.lib.planning.memory.offload_terms import (
    gathered_weights,
    offload_window,
    offloaded_bytes,
)
from workflow.lib.planning.memory.terms import (
    CUBLAS_BYTES,
    kept_activations,
    lora_parameters,
    moment_bytes,
    packed_slice,
    saved_activations,
    stored_terms,
)


def test_offloaded_embedding_is_not_on_the_gpu() -> None:
    there, away = (stored_terms(llama_70b(), setup(offload_embedding=x)) for x in (False, True))
    assert there["embedding_and_head"] == 2 * away["embedding_and_head"] == 2 * 8192 * 32000


def test_tied_table_is_on_the_gpu_for_the_head_though_the_embedding_is_offloaded() -> None:
    shape = replace(llama_70b(), tied_embeddings=True)
    there, away = (stored_terms(shape, setup(offload_embedding=x)) for x in (False, True))
    assert there == away


def test_stored_terms_of_a_tiny_model_by_hand() -> None:
    # 101 x 30 embedding and head, 3 layers, 2 processes, bf16; every tensor is rounded up to 512
    # bytes.
    # Packed: q, o 900 weights = 450 bytes -> 512; k, v 300 -> 512; gate, up, down 1380 = 690 bytes
    # -> 1024; scales and scales of scales 14 x 512. A slice is half of these 12,288 bytes.
    # Adapters r = 2: A (2, 30) one row = 120 bytes, B (30, 2) 15 rows = 120 bytes, all -> 512.
    stored = stored_terms(tiny, setup(rank=2, seq_len=61))
    assert stored == {
        "cublas_workspace": CUBLAS_BYTES,
        "nf4_weights": 3 * (4 * 512 + 3 * 1024 + 14 * 512) // 2,
        "nf4_scales": 0,
        "nf4_tables": 3 * 7 * (512 + 1024 + 512),
        "embedding_and_head": 2 * (51 * 30 * 2 + 12),  # 3060 -> 3072
        "module_weights": 0,
        "norms_and_biases": 3 * 2 * 512 + 512,
        "lora_weights": 3 * 14 * 512,
        "adam_moments": 2 * 3 * 14 * 512,
        "inputs": 61 * (32 + 2 * 10 * 2),
    }


def test_trained_tables_take_16_bytes_a_weight_of_their_slices_by_hand() -> None:
    """Two slices of 51 x 30: 6120 -> 6144 bytes in fp32; three more times of it are gradients and
    moments.
    """
    for chosen, tables in (
        (setup(processes=2, trains_head=True), 1),
        (setup(processes=2, trains_head=True, trains_embedding=True), 2),
    ):
        stored = stored_terms(tiny, chosen)
        frozen = stored_terms(tiny, replace(chosen, trains_head=False, trains_embedding=False))
        assert stored["module_weights"] == tables * 6144
        assert stored["adam_moments"] - frozen["adam_moments"] == 2 * tables * 6144
        assert stored["embedding_and_head"] == (2 - tables) * 3072
        assert predict(tiny, chosen).phases["optimizer_step"]["module_gradients"] == tables * 6144


def test_gradient_of_a_trained_head_is_made_while_that_of_earlier_micro_batches_lies_there() -> (
    None
):
    loss = predict(tiny, setup(trains_head=True, accumulation_steps=2)).phases["loss"]
    assert loss["module_gradients"] == loss["new_module_gradients"] == 6144
    # a copy in bf16 (3060 -> 3072), two slices' products of 2048 rows, and a piece of the gradient
    chunk = 2 * 512 * 51 * 2
    assert loss["module_workspace"] == 3072 + chunk + 51 * 30 * 2


def test_saved_activations_of_a_tiny_layer_by_hand() -> None:
    # h 30, f 46, q 30, k 10, 3 heads, r 5 on 7 linears, T = 2 x 7, bf16
    per_token = (
        2 * 4 * 30  # fp32 inputs of two norms
        + 2 * 2 * 30 + 2 * 2 * 10 + 4 * 3  # q and output, k and v, log-sum-exp
        + 3 * 2 * 46  # gate, activation, up
        + 2 * (2 * 30 + 46)  # inputs of q k v, of gate up, of down
        + 2 * 5 * 7  # x A^T
    )  # fmt: skip
    chosen = setup(micro_batch_size=2, seq_len=7, rank=5)
    assert saved_activations(tiny.kinds[0], chosen) == 14 * per_token


def test_nf4_takes_half_a_byte_and_an_eighth_of_a_bit_per_weight() -> None:
    shape = llama_70b()
    stored = stored_terms(shape, setup(processes=1))
    bits = 8 * (stored["nf4_weights"] + stored["nf4_scales"]) / shape.quantized_weights
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3)  # QLoRA, section 3: 4.127


def test_single_quantization_takes_half_a_bit_more() -> None:
    shape = llama_70b()
    scales = stored_terms(shape, setup(processes=1, double_quant=False))["nf4_scales"]
    assert 8 * scales / shape.quantized_weights == pytest.approx(0.5, abs=1e-3)


def test_lora_parameters_of_llama_2_70b() -> None:
    # r = 16 on all linears: 207.1 million, as PEFT prints for this model
    assert lora_parameters(llama_70b(), setup(rank=16)) == 207_093_760


def test_gathered_pieces_are_the_shards_together() -> None:
    tensors = [(101, 60), (7, 4), (1, 512)]
    assert gathered_bytes(tensors, processes=3) == 6144 + 512 + 1536  # 34 x 3 rows, 9, 3


def test_parameters_of_ranks_and_magnitudes_by_hand() -> None:
    chosen = setup(rank=3, targets=("q_proj", "down_proj"), ranks={"down_proj": 5}, dora=True)
    expected = 3 * (8192 + 8192) + 8192 + 5 * (28672 + 8192) + 8192
    assert lora_parameters(llama_70b(layers=2), chosen) == 2 * expected


def test_every_third_of_seven_layers_keeps_its_input_alone() -> None:
    """Layers 0, 3 and 6 are recomputed; the last one of them just then, in backward's first
    phase.
    """
    shape = llama_70b(layers=7)
    chosen = setup(activation_checkpointing=3)
    terms = predict(shape, chosen).phases["backward_first_layer"]
    assert terms["layer_inputs"] == 3 * 2 * chosen.tokens * 8192
    assert terms["saved_activations"] == (4 + 1) * saved_activations(shape.kinds[0], chosen)


def test_fused_layers_keep_a_third_for_norms_and_two_wide_tensors_less() -> None:
    """In bf16: two norms' inputs of 8,192 at 2 instead of 4 bytes, and not their outputs;
    activation and product of 28,672.
    """
    chosen = setup(activation_checkpointing=False)
    stock, fused = (
        saved_activations(llama_70b().kinds[0], replace(chosen, fused_layers=flag))
        for flag in (False, True)
    )
    assert stock - fused == chosen.tokens * (2 * 2 * 8192 + 2 * 2 * 8192 + 2 * 2 * 28672)


def test_rounded_activations_take_a_byte_and_their_scales_but_for_queries_and_keys() -> None:
    """Of a fused layer of 70B: both norms' inputs, values, output, gate and up, with a scale of 4
    bytes for 128 each; at 2 bytes queries, keys and what adapters multiply; log-sum-exp in fp32.
    """
    chosen = setup(
        activation_checkpointing=False, fused_layers=True, saved_activations="float8", rank=16
    )
    elements = 2 * 8192 + 1024 + 8192 + 2 * 28672
    exact = 2 * (8192 + 1024) + 2 * 7 * 16 + 4 * 64
    layer = llama_70b().kinds[0]
    assert kept_activations(layer, chosen) == chosen.tokens * (elements * 33 // 32 + exact)
    plain = replace(chosen, saved_activations="compute_dtype")
    assert kept_activations(layer, plain) == saved_activations(layer, plain)
    share = kept_activations(layer, chosen) / saved_activations(layer, chosen)
    assert share == pytest.approx(0.565, abs=0.002)


def test_rounded_activations_of_all_layers_on_the_host_are_as_much_less() -> None:
    plain = setup(offload_activations=True, activation_checkpointing=False, fused_layers=True)
    chosen = replace(plain, saved_activations="float8")
    one, other = (offloaded_bytes(llama_70b(), x) for x in (chosen, plain))
    assert one / other == pytest.approx(0.565, abs=0.002)
    assert offload_window(llama_70b(), chosen) == kept_activations(llama_70b().kinds[0], chosen)
    inputs = replace(plain, activation_checkpointing=True)
    rounded = replace(inputs, saved_activations="float8")
    assert offloaded_bytes(llama_70b(), rounded) == offloaded_bytes(llama_70b(), inputs)


def test_offloaded_inputs_leave_two_on_the_gpu() -> None:
    chosen = setup(offload_activations=True)
    terms = predict(llama_70b(), chosen).phases["forward_layer"]
    row = 2 * chosen.tokens * 8192
    assert terms["offloaded_activations"] == 2 * row
    assert "layer_inputs" not in terms
    assert offloaded_bytes(llama_70b(), chosen) == 80 * 2 ** (row - 1).bit_length()


def test_offloaded_activations_leave_one_layers_on_the_gpu() -> None:
    chosen = setup(offload_activations=True, activation_checkpointing=False)
    terms = predict(llama_70b(), chosen).phases["forward_layer"]
    assert terms["offloaded_activations"] == saved_activations(llama_70b().kinds[0], chosen)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"), [("adamw", 8), ("adamw_8bit", 2 + 8 / 256), ("muon", 4)]
)
def test_states_of_an_optimizer_take_what_its_row_says(optimizer: str, bytes_each: float) -> None:
    """Llama-2-70B, rank 16, one process: 80 layers of q, o (2 x 16 x 8192), k, v (16 x 9216), and 3
    x 16 x 36864.
    """
    chosen = setup(processes=1, rank=16, optimizer=optimizer)
    elements = 80 * 16 * (2 * 2 * 8192 + 2 * 9216 + 3 * 36864)
    found = moment_bytes(llama_70b(), chosen)
    assert found == pytest.approx(elements * bytes_each, rel=1e-3)  # rounded to 512 bytes


@pytest.mark.parametrize("processes", [1, 2])
def test_layers_on_the_host_take_their_packed_weights_from_every_process(processes: int) -> None:
    chosen = setup(processes=processes, offload_layers=20)
    here, there = (stored_terms(llama_70b(), replace(chosen, offload_layers=x)) for x in (0, 20))
    for term in ("nf4_weights", "nf4_scales"):
        assert there[term] == here[term] * 60 // 80
    assert there["lora_weights"] == here["lora_weights"]
    packed = 855_638_016 * (0.5 + 1 / 64)  # of a layer; and 4 bytes for 256 blocks
    fetched = gathered_weights(llama_70b(), chosen)
    assert fetched == pytest.approx(packed * processes, rel=0.001)  # of several the next one's too


@pytest.mark.parametrize(("count", "there"), [(0, 0), (4, 1), (5, 2), (8, 2)])
def test_neighbours_on_the_host_are_on_the_gpu_together(count: int, there: int) -> None:
    shape = llama_70b(layers=8)
    one = packed_slice(shape.kinds[0], setup(processes=1))
    assert gathered_weights(shape, setup(processes=1, offload_layers=count)) == there * one


@pytest.mark.parametrize("count", [0, 5, 8])
def test_several_processes_gather_the_layer_in_use_and_the_next(count: int) -> None:
    shape = llama_70b(layers=8)
    one = 3 * packed_slice(shape.kinds[0], setup(processes=3))
    assert gathered_weights(shape, setup(processes=3, offload_layers=count)) == 2 * one

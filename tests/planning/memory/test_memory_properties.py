"""Properties of the closed form for any model and any run: what never takes less, and sums."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory_examples import peak, setups, small_shapes
from tests.support.preflight_examples import setup
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.explanations import EXPLANATIONS
from workflow.lib.planning.memory.layer_tensors import gathered_bytes, sharded_bytes
from workflow.lib.planning.memory.terms import stored_terms
from workflow.lib.step_plan.plan import StepPlan


@settings(deadline=None)
@given(
    shape=small_shapes,
    chosen=setups,
    modules=st.sampled_from([(True, False), (False, True), (True, True)]),
)
def test_trained_modules_never_take_less_and_are_explained(
    shape: ModelShape, chosen: StepPlan, modules: tuple[bool, bool]
) -> None:
    untied = replace(shape, tied_embeddings=False)
    trained = replace(chosen, trains_head=modules[0], trains_embedding=modules[1])
    assert peak(untied, trained) >= peak(untied, chosen)
    for terms in predict(untied, trained).phases.values():
        assert all(size > 0 for size in terms.values())
        assert set(terms) <= set(EXPLANATIONS)


@settings(deadline=None)
@given(shape=small_shapes, chosen=setups)
def test_terms_sum_to_the_peak_and_no_phase_is_larger(shape: ModelShape, chosen: StepPlan) -> None:
    prediction = predict(shape, chosen)
    totals = [sum(terms.values()) for terms in prediction.phases.values()]
    assert prediction.peak_bytes == max(totals) == sum(
        prediction.phases[prediction.peak_phase].values()
    )  # fmt: skip


@settings(deadline=None)
@given(shape=small_shapes, chosen=setups)
def test_every_term_is_a_whole_number_above_zero_and_explained(
    shape: ModelShape, chosen: StepPlan
) -> None:
    for terms in predict(shape, chosen).phases.values():
        assert all(isinstance(size, int) and size > 0 for size in terms.values())
        assert set(terms) <= set(EXPLANATIONS)


@settings(deadline=None)
@given(shape=small_shapes, chosen=setups, more=st.integers(1, 50))
def test_more_processes_never_store_more_each(
    shape: ModelShape, chosen: StepPlan, more: int
) -> None:
    """Packed weights and their scales together: several processes have slices of both."""
    fewer, wider = (
        stored_terms(shape, replace(chosen, processes=processes))
        for processes in (chosen.processes, chosen.processes + more)
    )
    packed = [terms.pop("nf4_weights") + terms.pop("nf4_scales") for terms in (fewer, wider)]
    assert packed[1] <= packed[0]
    assert all(wider[name] <= fewer[name] for name in fewer if name != "embedding_and_head")


@given(shape=small_shapes, processes=st.integers(1, 600))
def test_embedding_and_head_are_cut_in_8_slices_or_more_wherever_there_are_processes(
    shape: ModelShape, processes: int
) -> None:
    chosen, few = setup(processes=processes), setup(processes=min(processes, 8))
    assert processes % chosen.slices == 0
    stored, most = (stored_terms(shape, x)["embedding_and_head"] for x in (chosen, few))
    assert stored <= most


@given(
    tensors=st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999)), max_size=5),
    processes=st.integers(2, 99),
)
def test_shards_hold_all_rows(tensors: list[tuple[int, int]], processes: int) -> None:
    total = sum(rows * width for rows, width in tensors)
    assert processes * sharded_bytes(tensors, processes=processes) >= total
    assert gathered_bytes(tensors, processes=processes) >= total


@settings(deadline=None)
@given(
    shape=small_shapes,
    chosen=setups,
    key=st.sampled_from(["seq_len", "micro_batch_size", "rank"]),
    more=st.integers(1, 300),
)
def test_longer_larger_and_richer_never_take_less(
    shape: ModelShape, chosen: StepPlan, key: str, more: int
) -> None:
    larger = replace(chosen, **{key: getattr(chosen, key) + more})
    assert peak(shape, larger) >= peak(shape, chosen)


@settings(deadline=None)
@given(shape=small_shapes, chosen=setups)
def test_accumulation_never_takes_less(shape: ModelShape, chosen: StepPlan) -> None:
    once, often = (replace(chosen, accumulation_steps=steps) for steps in (1, 2))
    assert peak(shape, often) >= peak(shape, once)


@settings(deadline=None)
@given(shape=small_shapes.filter(lambda shape: shape.num_layers > 1), chosen=setups)
def test_keeping_layers_gathered_never_takes_less(shape: ModelShape, chosen: StepPlan) -> None:
    freed, kept = (replace(chosen, reshard_after_forward=flag) for flag in (True, False))
    assert peak(shape, kept) >= peak(shape, freed)


@given(shape=small_shapes, chosen=setups)
def test_dora_never_takes_less(shape: ModelShape, chosen: StepPlan) -> None:
    assert peak(shape, replace(chosen, dora=True)) > peak(shape, chosen)


@given(shape=small_shapes.filter(lambda shape: shape.num_layers > 2), chosen=setups)
def test_offloading_never_takes_more_where_all_layers_are_recomputed(
    shape: ModelShape, chosen: StepPlan
) -> None:
    here, there = (
        replace(chosen, offload_activations=flag, activation_checkpointing=True)
        for flag in (False, True)
    )
    assert (
        peak(shape, there)
        <= peak(shape, here) + 2 * here.compute_bytes * here.tokens * shape.hidden_size
    )


@given(shape=small_shapes, chosen=setups.filter(lambda chosen: chosen.processes > 1))
def test_replicas_take_what_as_many_fewer_processes_take(
    shape: ModelShape, chosen: StepPlan
) -> None:
    """Not one process, which gathers nothing and so keeps its casts of adapters."""
    replicas = replace(chosen, processes=4 * chosen.processes, replicas=4)
    assert predict(shape, replicas) == predict(shape, chosen)

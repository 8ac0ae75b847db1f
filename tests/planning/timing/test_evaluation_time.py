"""The predicted time of an evaluation, by hand, and by what it depends on."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.preflight_examples import (
    cpu_machine,
    llama_70b,
    machine,
    setup,
    token_counts,
)
from workflow.lib.artifacts.preflight_record import EvaluationEstimate
from workflow.lib.model.architecture.model_shape import Linear
from workflow.lib.planning.timing.evaluation_time import (
    TaskTokens,
    estimate_evaluation,
    forward_work,
    questions,
)
from workflow.lib.planning.timing.machine_speed import Speed, speed_of
from workflow.lib.planning.timing.step_time import CPU_BANDWIDTH
from workflow.lib.settings.config import EvaluateConfig, load_config

HELDOUT = token_counts(heldout_tokens=6400, heldout_documents=64)
ONE_LAYER = llama_70b(layers=1, vocab=32000)


def estimated(
    *, tasks: TaskTokens | None = None, speed: Speed | None = None, **sections: Any
) -> EvaluationEstimate:
    run = load_config(sections | {"runs": {"demo": {}}})[1]["demo"]
    return estimate_evaluation(
        run,
        ONE_LAYER,
        setup(processes=1),
        HELDOUT,
        speed=speed or speed_of(machine(), calibration=None),
        tasks=tasks or TaskTokens(),
    )


def test_pass_over_the_original_is_two_flop_a_weight_by_hand() -> None:
    work = forward_work(ONE_LAYER, setup(seq_len=100), "original", tokens=700, passes=3)
    linears = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert work.product_flops == pytest.approx(700 * 2 * (linears + 32000 * 8192))
    assert work.attention_flops == pytest.approx(700 * 4 * 100 * 8192 / 2)  # flash: causal
    assert work.layer_passes == 3
    assert work.dequantized_bytes == 3 * linears * 2  # in 16 bits, once a pass


def test_passes_of_nf4_and_of_adapters_cost_more() -> None:
    def cost(subject: Any) -> tuple[float, float]:
        work = forward_work(ONE_LAYER, setup(), subject, tokens=700, passes=3)
        return work.product_flops, work.dequantized_bytes

    original, base, tuned = (cost(name) for name in ("original", "base", "tuned"))
    assert base == (original[0], 2 * original[1])
    assert tuned[0] > base[0]
    assert cost("merged") == original
    assert cost("tuned_on_original") == (tuned[0], original[1])


def test_experts_weights_move_once_a_pass_as_all_others_do() -> None:
    """And a token is multiplied by top_k of them."""
    stack, kind = Linear("e.down_proj", 8 * 8192, 512, 8), ONE_LAYER.kinds[0]
    layer = replace(kind, linears=(*kind.linears[:4], stack), top_k=2, kept_bytes=1)
    shape = replace(ONE_LAYER, kinds=(layer,))
    work = forward_work(shape, setup(), "original", tokens=700, passes=3)
    assert work.expert_flops == pytest.approx(700 * 2 * 1.4 * 2 * 8192 * 512)
    assert work.expert_weight_bytes == 0
    assert work.dequantized_bytes == 3 * 2 * shape.quantized_weights


def test_every_measured_subject_counts_and_they_add_up() -> None:
    found = estimated(export={"merged": True})
    assert list(found.subjects_s) == ["original", "base", "tuned", "merged"]
    assert found.total_s == pytest.approx(sum(found.subjects_s.values()))
    two = estimated(evaluate={"subjects": ["base", "tuned"]})
    assert two.subjects_s == {name: found.subjects_s[name] for name in ("base", "tuned")}


def test_documents_answers_and_tasks_are_what_is_asked() -> None:
    settings = EvaluateConfig(max_documents=16, samples=20, max_new_tokens=7)
    asked = questions(settings, HELDOUT, TaskTokens(900))
    assert (asked.read_tokens, asked.length) == (16 * 100 + 900, 100)
    assert (asked.answers, asked.answer_tokens) == (16, 7)  # no more answers than documents
    drawn = settings.model_copy(update={"sample_temperature": 0.5, "heldout": False})
    asked = questions(drawn, HELDOUT, TaskTokens(900))
    assert (asked.read_tokens, asked.answers) == (900, 32)


def test_twice_the_tasks_take_twice_the_time_and_answers_take_passes() -> None:
    nothing = {"samples": 0, "heldout": False}
    once, twice = (estimated(tasks=TaskTokens(n * 10**6), evaluate=nothing).total_s for n in (1, 2))
    assert once
    assert twice == pytest.approx(2 * once, rel=0.01)
    short, long = (
        estimated(evaluate={**nothing, "samples": 8, "max_new_tokens": n}).total_s
        for n in (10, 1000)
    )
    assert short
    assert long
    assert long > 50 * short


def test_cpu_computes_with_all_threads_and_reads_the_weights_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = forward_work(ONE_LAYER, setup(compute_dtype="float32"), "base", tokens=700, passes=3)
    seconds = []
    for threads in (1, 4):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        seconds.append(speed_of(cpu_machine(), calibration=None).forward_seconds(work))
    moving_s = work.dequantized_bytes / CPU_BANDWIDTH
    assert seconds[0] - moving_s == pytest.approx(4 * (seconds[1] - moving_s))


def test_unknown_gpu_has_no_predicted_evaluation() -> None:
    speed = replace(speed_of(machine(), calibration=None), known=False)
    found = estimated(speed=speed, tasks=TaskTokens(5, ("mmlu",)))
    assert (found.total_s, found.subjects_s, found.not_counted) == (None, {}, ["mmlu"])
    assert found.read_tokens == 6405

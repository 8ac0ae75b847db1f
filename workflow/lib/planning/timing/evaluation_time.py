"""Seconds of an evaluation: what each subject takes for the same questions.

A token that is read costs a forward pass, 2 FLOP a weight. An answer is written token by token: a
batch of answers takes a pass for each, and from NF4 all weights are decoded in every pass. Loading
the models, and what the harness does besides asking them, is not counted.
"""

import math
from dataclasses import dataclass, replace

from workflow.lib.artifacts.preflight_record import EvaluationEstimate
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.timing.machine_speed import Speed
from workflow.lib.planning.timing.step_work import Work, micro_batch_work
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import EvaluateConfig, RunConfig
from workflow.lib.settings.subjects import SubjectName
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import COMPUTE_DTYPE

# Sequences that go through a model at once; `evaluation.batch_size` starts with as many at most.
LARGEST_BATCH = {"cuda": 64, "cpu": 16}
NF4_SUBJECTS = ("base", "tuned")
ADAPTED_SUBJECTS = ("tuned", "tuned_on_original")


@dataclass(frozen=True)
class TaskTokens:
    """What the tasks of a run ask: tokens that are read, and tasks of which nothing is known."""

    tokens: int = 0
    not_counted: tuple[str, ...] = ()


NO_TASKS = TaskTokens()


@dataclass(frozen=True)
class Questions:
    """What each subject is asked: tokens that it reads, in sequences of some length, and answers
    that it writes, each of so many tokens at most.
    """

    read_tokens: int
    length: int
    answers: int
    answer_tokens: int


def questions(settings: EvaluateConfig, tokens: TokenCounts, tasks: TaskTokens) -> Questions:
    """Return what the settings ask of every subject.

    Every held-out document counts as long as their mean.
    """
    documents = tokens.heldout_documents
    chosen = min(documents, settings.max_documents or documents)
    length = math.ceil(tokens.heldout_tokens / documents) if documents else 1
    answers = min(settings.samples, chosen)
    heldout = chosen * length if settings.heldout else 0
    if settings.sample_temperature is not None:
        answers *= 2
    return Questions(heldout + tasks.tokens, length, answers, settings.max_new_tokens)


def estimate_evaluation(
    run: RunConfig,
    shape: ModelShape,
    setup: StepPlan,
    tokens: TokenCounts,
    *,
    speed: Speed,
    tasks: TaskTokens = NO_TASKS,
) -> EvaluationEstimate:
    """Return the predicted time of a run's evaluation; setup: that of its training."""
    asked = questions(run.evaluate, tokens, tasks)
    seconds: dict[str, float] = {}
    if speed.known:
        seconds = {
            name: _subject_seconds(name, asked, run.evaluate, shape, setup, speed)
            for name in run.subjects
        }
    return EvaluationEstimate(
        total_s=sum(seconds.values()) if speed.known else None,
        subjects_s=seconds,
        read_tokens=asked.read_tokens,
        written_tokens=asked.answers * asked.answer_tokens,
        not_counted=list(tasks.not_counted),
    )


def _subject_seconds(
    name: SubjectName,
    asked: Questions,
    settings: EvaluateConfig,
    shape: ModelShape,
    setup: StepPlan,
    speed: Speed,
) -> float:
    """Reading, and writing all answers at their full length. GPUs share both; processes on CPUs
    share the threads that one of them would have.
    """
    processes = _gpu_processes(settings, setup) if speed.platforms else 1
    batch = settings.batch_size
    if batch == "auto":
        batch = LARGEST_BATCH["cuda" if speed.platforms else "cpu"]
    read, answers = (math.ceil(n / processes) for n in (asked.read_tokens, asked.answers))
    whole = asked.length + asked.answer_tokens
    reading = forward_work(
        shape,
        replace(setup, seq_len=asked.length),
        name,
        tokens=read,
        passes=math.ceil(read / (batch * asked.length)),
    )
    writing = forward_work(
        shape,
        replace(setup, seq_len=whole),
        name,
        tokens=answers * whole,
        passes=math.ceil(answers / batch) * asked.answer_tokens,
    )
    return speed.forward_seconds(reading) + speed.forward_seconds(writing)


def _gpu_processes(settings: EvaluateConfig, setup: StepPlan) -> int:
    """Processes that share the questions: `auto` is one a GPU."""
    return setup.processes if settings.processes == "auto" else settings.processes


def forward_work(
    shape: ModelShape, setup: StepPlan, subject: SubjectName, *, tokens: int, passes: int
) -> Work:
    """Count the work of forward passes over `tokens` tokens, in sequences of `setup.seq_len`.

    It is forward's part of a step without recomputation (`micro_batch_work`): half of the products
    and of the elementwise work, 1 of 3.5 of attention. Stock layers are not fused. The weights move
    once a pass; those of NF4 twice, as they are decoded first.
    """
    adapted = subject in ADAPTED_SUBJECTS
    row = replace(
        setup,
        micro_batch_size=1,
        rank=setup.rank if adapted else 0,
        ranks=setup.ranks if adapted else {},
        dropout=False,
        dora=setup.dora and adapted,
        products=COMPUTE_DTYPE,
        fused_layers=False,
        activation_checkpointing=False,
        offload_activations=False,
    )
    step, rows = micro_batch_work(shape, row, trained_share=1.0), tokens / row.tokens
    moved = setup.compute_bytes * (2 if subject in NF4_SUBJECTS else 1)
    return Work(
        product_flops=rows * step.product_flops / 2,
        expert_flops=rows * step.expert_flops / 2,
        attention_flops=rows * step.attention_flops / 3.5,
        dequantized_bytes=passes * shape.quantized_weights * moved,
        kept_bytes=rows * step.kept_bytes / 2,
        layer_passes=passes * shape.num_layers,
        forward_share=1.0,
        layers=shape.num_layers,
    )

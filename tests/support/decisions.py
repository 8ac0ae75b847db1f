"""Decisions of preflight, by default about a Llama-3-8B on two RTX 4090. Nothing needs torch."""

from typing import Any

from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import llama_shape, machine, token_counts
from tests.support.refusals import refusal
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.preflight.decision import Decision, decide
from workflow.lib.planning.preflight.plan_search import Recorder
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.settings.config import RunConfig

llama_8b = llama_shape(
    layers=32, hidden=4096, feed_forward=14336, heads=32, kv_heads=8, vocab=128256
)

# Settings that leave the plan nothing to choose but micro-batch and recomputation.
AS_IT_WAS = {
    "offload_activations": False,
    "offload_layers": 0,
    "keep_decoded": 0,
    "reshard_after_forward": True,
    "context_parallel": 1,
}


def run_config(**sections: Any) -> RunConfig:
    """Settings for rows of 2,048 tokens and 16 rows a step."""
    data = {"seq_len": 2048} | sections.pop("data", {})
    return RunConfig.model_validate({"data": data} | sections)


def decided(
    shape: ModelShape = llama_8b,
    on: Machine | None = None,
    free: int = 10**12,
    record: Recorder | None = None,
    estimate: bool = False,
    **sections: Any,
) -> Decision:
    tokens, record = token_counts(seq_len=2048), record or MadeUpMemory(shape)
    run = run_config(**sections)
    return decide(PlannedRun(run, shape, on or machine(), tokens, record, estimate, free))


def message(**arguments: Any) -> str:
    return refusal(decided, **arguments)

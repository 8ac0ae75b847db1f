"""Plans and forecasts for tests, as preflight makes them; nothing here needs torch."""

from typing import Any

from workflow.lib.artifacts.preflight_record import Forecast, TriedPlan
from workflow.lib.step_plan.plan import StepPlan

# Fields of a plan that tests name beside settings.
PLANNED = {
    "micro_batch_size",
    "accumulation_steps",
    "replicas",
    "activation_checkpointing",
    "keep_attention",
    "reshard_after_forward",
    "offload_activations",
    "offload_window_bytes",
    "offload_embedding",
    "offload_layers",
    "keep_decoded",
    "tile_tokens",
    "shares_prompts",
}


def make_plan(**changes: Any) -> StepPlan:
    """The plan of one CPU process with a row at a time, all layers recomputed."""
    fields = {
        "device": "cpu",
        "processes": 1,
        "micro_batch_size": 1,
        "seq_len": 64,
        "rank": 4,
        "targets": ("q_proj", "v_proj"),
        "compute_dtype": "float32",
        "attention": "sdpa",
        "num_steps": 6,
    }
    return StepPlan(**(fields | changes))


def tried_plan(**changes: Any) -> TriedPlan:
    """A chosen plan with a row at a time, nothing offloaded; changes: of its figures, or fields of
    the plan."""
    choice = {
        "micro_batch_size": 1,
        "activation_checkpointing": True,
        "offload_activations": False,
        "offload_layers": 0,
        "reshard_after_forward": True,
    }
    figures = {
        "host_bytes": 2**32,
        "peak_bytes": 2**31,
        "relative_time": 1.0,
        "fits": True,
        "why": "chosen",
    }
    choice |= {name: value for name, value in changes.items() if name not in figures}
    figures |= {name: value for name, value in changes.items() if name in figures}
    return TriedPlan(choice=choice, **figures)


def make_forecast(**changes: Any) -> Forecast:
    """The forecast of two CPU processes with two rows at a time: a peak of 2 GiB of 4 GiB."""
    fields = {
        "verdict": "fits",
        "reason": "micro-batch 2 needs 2.00 of 4.00 GiB",
        "plan": make_plan(processes=2, micro_batch_size=2),
        "method": "lines",
        "terms": [{"name": "adam_moments", "bytes": 2**30, "explanation": "both moments"}],
        "phases": {"forward": 2**31},
        "peak_phase": "forward",
        "peak_bytes": 2**31,
        "allocator_slack_bytes": 0,
        "reserved_bytes": 2**31,
        "outside_allocator_bytes": 0,
        "capacity_bytes": 2**32,
        "margin_bytes": 0,
        "host_bytes": 2**32,
        "host_capacity_bytes": 2**33,
        "disk_bytes": {"adapter": 2**20},
        "disk_free_bytes": 2**34,
        "time": {
            "step_s": None,
            "total_h": None,
            "tokens_per_s_per_process": None,
            "cost": None,
            "parts_s": {},
            "basis": "unknown device",
        },
        "candidates": [
            tried_plan(why="slower", peak_bytes=3 * 2**29, relative_time=1.1),
            tried_plan(micro_batch_size=2),
        ],
        "model": {"order": [0] * 3},
    }
    return Forecast(**(fields | changes))

"""What was measured on GPUs (`tests/gpu/measurements`) beside what is predicted for it, as rows and
as a table.

`python -m tests.support.measurements` writes the table of memory anew into
workflow/docs/memory-model.md.
"""

import gzip
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from workflow.lib.benchmark.cases import model_config
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.vocabulary_slices import chunk_rows, exchanged_rows
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.closed_form import Prediction, predict
from workflow.lib.planning.memory.replay import Replay, replay_tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_adapters import CASTS, WEIGHT
from workflow.lib.planning.memory.trace_step import step_trace
from workflow.lib.settings.benchmark import BenchmarkConfig
from workflow.lib.system.units import GIB

FOLDER = Path(__file__).parents[1] / "gpu" / "measurements"
PAGE = Path(__file__).parents[2] / "workflow" / "docs" / "memory-model.md"
MARKS = ("<!-- measured: begin -->\n", "<!-- measured: end -->")
# These measured an engine that has changed since: the loss held its rows' gradient until the next
# loss was there (595691e), embedding rows did not come with the batch, fused feed-forwards did not
# compute in place (b6da1de), and a chunk of the loss had 1,024 rows whatever the vocabulary
# (5aedd46). Of activations on the host one less was on the device.
BEFORE = {"3111dfe", "7c13ebf"}
# Fused layers are today's since these: queries, keys and values became one node, and what a norm
# has made is not kept (892fd18).
FUSED_AS_NOW = {"2986d7a", "b5887f2", "e854bc4", "79c85ae", "79d1f8a", "78128dc", "5af4ce8"}
# An adapter's part of a value is made before the frozen weight is decoded since 7b93d26; before,
# the weight came first.
VALUES_FIRST = {
    "2986d7a",
    "e6a3b18",
    "b5887f2",
    "e854bc4",
    "79c85ae",
    "79d1f8a",
    "78128dc",
    "5af4ce8",
}
# AdamW's moments are made before the first step in these; before, in the first update.
MOMENTS_AT_ONCE = {"2986d7a", "e854bc4", "79c85ae", "79d1f8a", "78128dc", "5af4ce8"}
# Dropout and DoRA were PEFT's own forward, and every use cast its adapters, until these.
CASTS_EACH_USE = (BEFORE | VALUES_FIRST | MOMENTS_AT_ONCE | {"8e40e65", "90d21bf", "f08bbfc"}) - {
    "2986d7a"
}

# What the allocator reserves depends on what the process has done before. Measured after other
# cases, these reserved 20% and 8% more than the replay; measured again, first in their processes,
# 2% more and 0.5% less. The lines of then are left out.
ALONE = {"1b_eager", "70b_rank_64"}
AFTER_OTHERS = "7c13ebf"


@dataclass(frozen=True)
class Row:
    """A measurement of our engine, the replay of it, and the closed form's peak; bytes."""

    case: str
    processes: int
    setup: Setup
    shape: ModelShape
    allocated_bytes: int
    reserved_bytes: int
    replayed: Replay
    closed_bytes: int

    @property
    def allocated_error(self) -> float:
        """Share by which the replay is above what was measured."""
        return self.replayed.allocated_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        """The same of what was reserved."""
        return self.replayed.reserved_bytes / self.reserved_bytes - 1

    @property
    def closed_error(self) -> float:
        """The same of the closed form's peak."""
        return self.closed_bytes / self.allocated_bytes - 1


def rows() -> list[Row]:
    """Return all measurements of our engine's memory that say what the engine of today does."""
    return [_row(line) for line in all_lines() if _counts(line)]


def all_lines() -> list[dict[str, Any]]:
    """Return the lines of all files of measurements."""
    names = sorted(path.name.removesuffix(".gz") for path in FOLDER.glob("*.jsonl.gz"))
    return [line for name in names for line in measured_lines(name)]


def measured_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of measurements, which lies compressed."""
    with gzip.open(FOLDER / f"{name}.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@cache
def described(config: str, name: str) -> ModelShape:
    """Return the description of a config.json, made once."""
    return describe_config(json.loads(config), origin=Path(name))


def _counts(line: dict[str, Any]) -> bool:
    if line.get("setup") is None or not (line.get("measured") or {}).get("allocated_bytes"):
        return False
    commit, setup = line["versions"]["commit"], line["setup"]
    if line["case"] in ALONE and commit == AFTER_OTHERS:
        return False
    if setup["fused_layers"] and commit not in FUSED_AS_NOW:
        return False
    if commit in CASTS_EACH_USE and (setup["dropout"] or setup.get("dora")):
        return False
    if commit not in BEFORE:
        return True
    slices = Setup(**line["setup"]).slices
    vocab_size = model_config(BenchmarkConfig(**line["sizes"]))["vocab_size"]
    same_chunks = chunk_rows(slices, vocab_size=vocab_size) == exchanged_rows(slices)
    return same_chunks and not setup["offload_activations"]


def _row(line: dict[str, Any]) -> Row:
    setup = Setup(**line["setup"] | {"targets": tuple(line["setup"]["targets"])})
    sizes = BenchmarkConfig(**line["sizes"])
    shape = described(json.dumps(model_config(sizes)), sizes.model)
    tape = step_trace(shape, setup, checked=sizes.check_bytes)
    if line["versions"]["commit"] in CASTS_EACH_USE:
        keep_no_casts(tape)
    all_adapted = len(setup.targets) == len(shape.linear_names)
    if line["versions"]["commit"] not in VALUES_FIRST and all_adapted:
        decode_weights_first(tape)
    if line["versions"]["commit"] not in MOMENTS_AT_ONCE:
        make_moments_late(tape)
    if line["versions"]["commit"] in BEFORE:
        hold_gradient_of_loss(tape)
        if setup.offload_embedding:
            free_rows_when_embedded(
                tape, num_bytes=setup.compute_bytes * setup.tokens * shape.hidden_size
            )
    return Row(
        line["case"], line["processes"], setup, shape,
        line["measured"]["allocated_bytes"], line["measured"]["reserved_bytes"],
        replay_tape(tape), closed_peak(predict(shape, setup), line["versions"]["commit"]),
    )  # fmt: skip


def closed_peak(prediction: Prediction, commit: str) -> int:
    """Return the closed form's peak, without kept casts where there were none."""
    left_out = {CASTS} if commit in CASTS_EACH_USE else set()
    return max(
        sum(size for term, size in terms.items() if term not in left_out)
        for terms in prediction.phases.values()
    )


def keep_no_casts(tape: Tape) -> None:
    """Leave out the casts of adapters that are kept, which are far larger than one that is not."""
    tape.events = [
        event
        for event in tape.events
        if isinstance(event, str) or tape.terms[max(event, ~event)] != CASTS
    ]


def hold_gradient_of_loss(tape: Tape) -> None:
    """Have the gradient of the loss's rows held until the next backward or the optimizer's step
    begins.
    """
    events: list[int | str] = []
    phase, of_loss, held = "", set[int](), []
    for event in tape.events:
        if isinstance(event, str):
            phase = event
            if phase in ("backward", "optimizer_step"):
                events += held
                held = []
        elif phase == "loss" and event >= 0 and tape.terms[event] == "hidden_states":
            of_loss.add(event)
        elif phase == "backward" and event < 0 and ~event in of_loss:
            of_loss, held = set(), [event]
            continue
        events.append(event)
    tape.events = events


def decode_weights_first(tape: Tape) -> None:
    """Have every weight decoded before the tensor is made that its product is now added to."""
    events: list[int | str] = []
    for event in tape.events:
        place = len(events)
        if isinstance(event, int) and event >= 0 and tape.terms[event] == WEIGHT:
            place -= 1
            if isinstance(events[place], int) and int(events[place]) < 0:  # the adapter, let go
                place -= 1
            target = events[place]
            if isinstance(target, str) or target < 0 or tape.terms[target] == WEIGHT:
                place = len(events)  # a second product into the same tensor
        events.insert(place, event)
    tape.events = events


def make_moments_late(tape: Tape) -> None:
    """Have AdamW's moments made as the first update begins."""
    moments = [
        e
        for e in tape.events
        if not isinstance(e, str) and e >= 0 and tape.terms[e] == "adam_moments"
    ]
    made = set(moments)
    others = [event for event in tape.events if event not in made]
    place = others.index("optimizer_step") + 1
    tape.events = others[:place] + moments + others[place:]


def free_rows_when_embedded(tape: Tape, *, num_bytes: int) -> None:
    """Have the embedding rows of a batch, of `num_bytes`, released when the embedding has run on
    them.
    """
    events: list[int | str] = []
    rows, early = -1, set[int]()
    for event in tape.events:
        if isinstance(event, int) and ~event in early:
            continue
        events.append(event)
        if isinstance(event, str) or event < 0:
            continue
        if tape.terms[event] == "inputs" and tape.sizes[event] == num_bytes:
            rows = event
        elif rows >= 0 and tape.sizes[event] == num_bytes:
            events.append(~rows)
            early.add(rows)
            rows = -1
    tape.events = events


def table(found: list[Row]) -> str:
    """Return the comparison in Markdown: a summary, and a line for each measurement."""
    lines = [
        _summary(found),
        "",
        "| case | GPUs | model | B x S | allocated GiB | replay | closed form | reserved GiB | "
        "replay | peak in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.processes} | {row.shape.num_layers} x {row.shape.hidden_size}, "
        f"V {row.shape.vocab_size:,} | {row.setup.micro_batch_size} x {row.setup.seq_len:,} | "
        f"{row.allocated_bytes / GIB:.3f} | {row.allocated_error:+.1%} | {row.closed_error:+.1%} | "
        f"{row.reserved_bytes / GIB:.3f} | {row.reserved_error:+.1%} | {row.replayed.peak_phase} |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


def _summary(found: list[Row]) -> str:
    parts = []
    for name, errors in (
        ("allocated, replay", [row.allocated_error for row in found]),
        ("allocated, closed form", [row.closed_error for row in found]),
        ("reserved, replay", [row.reserved_error for row in found]),
    ):
        typical = median(map(abs, errors))
        parts.append(f"{name}: median {typical:.2%}, from {min(errors):+.1%} to {max(errors):+.1%}")
    return f"{len(found)} measurements. {'; '.join(parts)}."


def written(page: str, found: list[Row]) -> str:
    """Return the page with the table in its place."""
    pattern = f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}"
    return re.sub(pattern, lambda _: MARKS[0] + table(found) + MARKS[1], page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows()), encoding="utf-8")

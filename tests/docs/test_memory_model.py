"""The tables of memory-model.md that quote predictions say what the model predicts now."""

import re
from pathlib import Path

import pytest

from tests.support.preflight_examples import llama_70b, setup
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

PAGE = Path(__file__).parents[2] / "workflow" / "docs" / "memory-model.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## A published table against this model")[1]
ROWS = re.findall(
    r"^\| (DDP|FULL_SHARD), (no )?recomputation, (\w+) attention, B = (\d) \|.*?\| ([\d.]+) "
    r"\|[^|]*\| (\d+) \|$",
    SECTION,
    re.MULTILINE,
)


def published_setup(sharding: str, kept: str, attention: str, rows: str) -> StepPlan:
    return setup(
        processes=1 if sharding == "DDP" else 2,
        micro_batch_size=int(rows),
        targets=("q_proj", "v_proj"),
        dropout=0.05,
        activation_checkpointing=0 if kept else 1,
        attention=attention,
        fused_layers=True,
    )


def test_all_rows_are_read() -> None:
    assert len(ROWS) == 5


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_row_of_the_published_table_is_what_the_model_predicts(row: tuple[str, ...]) -> None:
    *settings, gib, speed = row
    described = published_setup(*settings)
    cards = imagined_machine(described.processes, BY_NAME["NVIDIA GeForce RTX 4090"])
    parts = speed_of(cards, calibration=None).parts(llama_70b(), described, trained_share=1.0)
    tokens_per_s = described.tokens / sum(parts.values())
    assert predict(llama_70b(), described).peak_bytes / GIB == pytest.approx(float(gib), abs=0.06)
    assert tokens_per_s == pytest.approx(float(speed), abs=1)

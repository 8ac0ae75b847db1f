"""The table of time-model.md that sets published figures beside predictions says what the model
predicts now."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.preflight_examples import llama_70b, llama_shape, setup
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.system.gpu_models import parse_gpus

PAGE = Path(__file__).parents[2] / "workflow" / "docs" / "time-model.md"
ROWS = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
LLAMA_8B = llama_shape(
    layers=32, hidden=4096, feed_forward=14336, heads=32, kv_heads=8, vocab=128256
)


@dataclass(frozen=True)
class Case:
    """What a published figure was measured with, as far as it is known."""

    gpus: str
    shape: ModelShape
    changes: dict[str, Any]


CASES = {
    "fsdp_qlora, 2 x 4090": Case(
        "2x4090", llama_70b(), {"micro_batch_size": 2, "offload_layers": 80}
    ),
    "fsdp_qlora, 2 x 3090": Case(
        "2x3090", llama_70b(), {"micro_batch_size": 2, "offload_layers": 80}
    ),
    "fsdp_qlora, 4 x H100": Case("4xH100", llama_70b(), {"micro_batch_size": 8}),
    "fms-acceleration, 2 x A100": Case("2xA100", llama_70b(), {"seq_len": 4096}),
    "Accelerate + TRL, 2 x 3090": Case(
        "2x3090", llama_70b(vocab=128256), {"seq_len": 1024, "dropout": 0.05, "offload_layers": 80}
    ),
    "torchtune, 1 x 4090": Case("4090", LLAMA_8B, {"micro_batch_size": 2}),
    "unsloth, 1 x H200": Case("H200", LLAMA_8B, {"micro_batch_size": 2}),
    "unsloth, 1 x H200, all activations kept": Case(
        "H200", LLAMA_8B, {"micro_batch_size": 2, "activation_checkpointing": False}
    ),
}


def predicted(case):
    count, gpu = parse_gpus(case.gpus, setting="--gpus")
    chosen = setup(processes=count, fused_layers=True, **case.changes)
    speed = speed_of(imagined_machine(count, gpu))
    return chosen.tokens / sum(speed.parts(case.shape, chosen, trained_share=1.0).values())


def test_all_rows_are_read():
    assert [name.split(":")[0] for name, *_ in ROWS] == list(CASES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_says_what_the_model_predicts(row):
    name, _, told = row
    expected = predicted(CASES[name.split(":")[0]])
    assert float(told.replace(",", "")) == pytest.approx(expected, rel=0.005, abs=0.6)

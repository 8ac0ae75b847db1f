"""The user's path with a real model: the quickstart of the README, from a file of 60 chats to an
answer, on the CPU. Its other commands, and the pages', run in `test_page_commands.py`."""

import re

import pytest
import torch

from tests.support.page_commands import blocks
from tests.support.reader_clone import (
    ACTIVATE,
    copy_project,
    fork_stages,
    printed_by,
    run_commands,
    shrink,
    write_chats,
)
from tests.support.smollm2 import smollm2

# What this test changes in the config that was written: six steps of short rows, few questions.
SHRUNK = {
    "data": {"seq_len": 64},
    "train": {"epochs": None, "max_steps": 6, "learning_rate": 0.002},
    "hardware": {"gpus": 0, "cpu_processes": 1},
    "evaluate": {"samples": 1, "max_new_tokens": 8, "forgetting": False},
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A clone with SmolLM2, and what the commands print before and after the config is shrunk."""
    if not ACTIVATE.exists():
        pytest.skip("this interpreter is in no virtual environment, so there is no .venv")
    folder = copy_project(tmp_path_factory.mktemp("reader") / "clone")
    made = tmp_path_factory.mktemp("smollm2")
    smollm2(made, dtype=torch.bfloat16)
    (folder / "models").mkdir()
    (made / "model").rename(folder / "models" / "my-model")
    write_chats(folder / "chats.jsonl")
    fork_stages(folder)
    (quickstart,) = [block for block in blocks("README.md") if block.is_run_here]
    first, later = quickstart.text.split("snakemake", 1)
    written = run_commands(folder, "written", [first])
    shrink(folder / "mine.yaml", SHRUNK)
    return folder, written, run_commands(folder, "trained", [f"snakemake{later}"])


def test_config_is_written_for_a_real_model_and_60_chats(reader):
    _, written, _ = reader
    assert "chats.jsonl: messages; 57 documents to train on, 3 held out, 0 rows dropped" in written
    assert "run mine fits: a process takes" in written


def test_real_model_learns_the_chats(reader):
    folder, _, trained = reader
    losses = re.search(r"^run first\n  loss +([\d.]+) -> ([\d.]+) held out", trained, re.M)
    original, tuned = map(float, losses.groups())
    assert tuned < original / 2
    assert (folder / "results/runs/first/consolidate/adapter/adapter_model.safetensors").is_file()


def test_trained_model_answers_as_a_sailor(reader):
    *_, trained = reader
    command = "python -m workflow.scripts.chat first --prompt 'How do I repair a piano?'"
    assert printed_by(command, trained).splitlines()[-1].startswith("Ahoy!")

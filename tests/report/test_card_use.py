"""What the card says of the server that was tried."""

import pytest

from tests.report.test_model_card import read
from tests.support.report_examples import SERVED_CHECK, write_run
from workflow.lib.report.card_use import serving_section
from workflow.lib.report.model_card import model_card


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path, "demo", num_steps=3)


def test_command_is_the_one_that_was_run_and_cost_is_told(folder):
    text = serving_section(read(folder, checked=SERVED_CHECK))
    assert (
        "vllm serve acme/tiny-1b --tokenizer path/to/this/folder --enable-lora --max-lora-rank 32 "
        "--lora-modules demo=path/to/this/folder\n"
    ) in text
    assert "held-out loss is 1.5200 nats per token, +0.0200 against the adapter" in text
    assert "change of log-probabilities as in PEFT: adapter 100.0%, mlp 99.0%" in text


def test_loss_of_the_served_model_stands_first(folder):
    card = model_card(read(folder, checked=SERVED_CHECK))
    opening = card.partition("trained with FSDP-QLoRA. ")[2]
    assert opening.startswith("Served by vLLM 9.9 (tuned on original, float32), its held-out loss")


def test_merged_model_is_served_as_it_is(folder):
    change = {"subject": "merged", "max_lora_rank": None, "parts": [], "trained_loss": None}
    text = serving_section(read(folder, checked=SERVED_CHECK.model_copy(update=change)))
    assert "vllm serve path/to/merged\n" in text
    assert "against the adapter" not in text


def test_server_that_was_not_tried_has_no_command(folder):
    assert serving_section(read(folder)) == "No server was tried (`export.serve`).\n"

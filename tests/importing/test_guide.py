"""The guide: values by amount of data, width of the model and number of GPUs."""

import pytest

from workflow.importing.guide import AMOUNTS, RATES, batch_for, seq_len_for, settings_for


def settings(method="sft", **changes):
    asked = {"trained_tokens": 2_000_000, "packed_rows": 4000, "hidden_size": 4096, "gpus": 1}
    return settings_for(method, **(asked | changes))


@pytest.mark.parametrize("entry", AMOUNTS)
def test_rank_and_epochs_are_those_of_the_amount_up_to_its_bound(entry):
    tokens = min(entry.trained_tokens, 10**12)
    guided = settings(trained_tokens=tokens)
    assert (guided["lora"]["r"], guided["train"]["epochs"]) == (entry.rank, entry.epochs)
    assert settings(trained_tokens=tokens + 1)["lora"]["r"] > entry.rank or tokens == 10**12


@pytest.mark.parametrize(("width", "rate"), [(width, rate) for width, rate, _ in RATES])
def test_rate_is_that_of_the_width_up_to_its_bound(width, rate):
    assert settings(hidden_size=min(width, 10**6))["train"]["learning_rate"] == rate


def test_preferences_take_one_epoch_at_their_own_rate():
    train = settings("dpo")["train"]
    assert (train["objective"], train["epochs"], train["learning_rate"]) == ("dpo", 1, 5e-6)
    assert "objective" not in settings("sft")["train"]


@pytest.mark.parametrize(
    ("rows", "gpus", "batch"),
    [(4000, 1, 16), (4000, 3, 15), (400, 1, 8), (13, 1, 1), (13, 8, 8), (4000, 24, 24)],
)
def test_batch_leaves_a_hundred_steps_if_it_can_and_serves_all_gpus_alike(rows, gpus, batch):
    assert batch_for(rows, epochs=3, gpus=gpus) == batch


@pytest.mark.parametrize(
    ("p99", "most", "longest", "seq_len"),
    [
        (57, 57, 8192, 256),
        (700, 1300, 8192, 2048),
        (700, 9000, 8192, 1024),
        (9000, 9999, 4096, 4096),
    ],
)
def test_row_holds_all_documents_but_outliers_and_what_the_model_reads(p99, most, longest, seq_len):
    assert seq_len_for({"p99": p99, "max": most}, longest=longest) == seq_len

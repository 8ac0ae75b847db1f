"""The guide: length, rank, epochs, batch and learning rate by amount of data and size of a model.

`workflow/docs/choose-settings.md` shows `table()` and gives the sources. `new_config` writes the
values that differ from the defaults."""

from typing import Any, Literal, NamedTuple

Method = Literal["sft", "dpo", "kto"]


class Amount(NamedTuple):
    """Settings of supervised training for at most `trained_tokens` in one epoch."""

    trained_tokens: float
    words: str
    rank: int
    epochs: int


AMOUNTS = (
    Amount(100_000, "up to 100,000", 8, 5),
    Amount(10_000_000, "up to 10 million", 16, 3),
    Amount(100_000_000, "up to 100 million", 32, 2),
    Amount(float("inf"), "more", 64, 1),
)
PREFERENCE_EPOCHS, PREFERENCE_RATE = 1, 5e-6
# By width of the model (hidden_size): at most this, peak learning rate, models of that width.
RATES = (
    (1536, 5e-4, "up to 1,536 (most models below 2 billion weights)"),
    (5120, 2e-4, "up to 5,120 (3 to 32 billion weights)"),
    (float("inf"), 1e-4, "more (70 billion weights and above)"),
)
LEAST_STEPS = 100  # of a training, if the data allow it
BATCHES = (16, 8, 4, 2, 1)  # rows of a step
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def seq_len_for(lengths: dict[str, int], *, longest: int) -> int:
    """Return the shortest row that holds all documents, or 99% of them if the longest has more
    than twice that length. lengths: percentiles in tokens; longest: positions of the model."""
    needed = lengths["max"] if lengths["max"] <= 2 * lengths["p99"] else lengths["p99"]
    return min(longest, next((length for length in LENGTHS if length >= needed), LENGTHS[-1]))


def batch_for(packed_rows: int, *, epochs: int, gpus: int) -> int:
    """Return the rows of a step: a multiple of the GPUs, 16 or fewer for `LEAST_STEPS`."""
    enough = (n for n in BATCHES if packed_rows * epochs // n >= LEAST_STEPS)
    return max(1, round(next(enough, 1) / gpus)) * gpus


def settings_for(
    method: Method, *, trained_tokens: int, packed_rows: int, hidden_size: int, gpus: int
) -> dict[str, dict[str, Any]]:
    """Return the sections `lora` and `train` for an amount of data and a model."""
    amount = next(entry for entry in AMOUNTS if trained_tokens <= entry.trained_tokens)
    rate = next(rate for width, rate, _ in RATES if hidden_size <= width)
    epochs = amount.epochs
    if method != "sft":
        epochs, rate = PREFERENCE_EPOCHS, PREFERENCE_RATE
    batch = batch_for(packed_rows, epochs=epochs, gpus=gpus)
    train = {"epochs": epochs, "learning_rate": rate, "global_batch_size": batch}
    return {
        "lora": {"r": amount.rank},
        "train": ({} if method == "sft" else {"objective": method}) | train,
    }


def table() -> str:
    """Return the guide as Markdown."""
    amounts = [
        "| trained tokens of the data | `lora.r` | `train.epochs` |",
        "|---|---|---|",
        *(f"| {entry.words} | {entry.rank} | {entry.epochs} |" for entry in AMOUNTS),
    ]
    rates = [
        "| width of the model (`hidden_size`) | `train.learning_rate` |",
        "|---|---|",
        *(f"| {words} | {rate:g} |" for _, rate, words in RATES),
        f"| preferences (dpo, kto), any width | {PREFERENCE_RATE:g}, {PREFERENCE_EPOCHS} epoch |",
    ]
    return "\n".join([*amounts, "", *rates])

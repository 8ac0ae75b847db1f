"""Bits of the base before and after training: what a variant is, and that finished ones stay."""

import json

import pytest
import torch

from tests.quantization.test_calibrated_base import ROUNDING
from tests.support.forked_stage import forked_stage
from tests.support.models import quantized, stock_base
from tests.support.tokenizing import tokenized_model
from workflow.benchmark.bits_after_training import (
    BitsBenchmark,
    Recipe,
    Variant,
    finished,
    table,
)
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.model.adaptable_linears import adaptable_linears
from workflow.lib.system.files import provenance, write_checked_json

STILL = Recipe(steps=0, rows=2, learning_rate=1e-2, heldout_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tokenized_model(tmp_path_factory.mktemp("bits"))
    quantized(folder / "model", folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def costs(folder):
    linears = adaptable_linears(Checkpoint(folder / "model").build(torch.float32))
    return {path: 1.0 + number for number, path in enumerate(linears)}


@pytest.fixture(scope="module")
def benchmark(folder, costs):
    store = TokenStore.open(folder / "tokens")
    return BitsBenchmark(folder / "model", folder / "nf4", store, costs)


@torch.no_grad()
def loss_of(model, folder):
    store = TokenStore.open(folder / "tokens")
    ids, mask = (torch.tensor(x.tolist()) for x in store.heldout_documents()[0])
    log_p = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    targets = mask.nonzero().flatten()
    return -float(log_p[targets - 1, ids[targets]].sum())


@pytest.mark.parametrize(
    ("variant", "base"),
    [
        (Variant("16 bits", share=1.0), "model"),
        (Variant("NF4"), "nf4"),
        (Variant("NF4, calibrated", "calibrated"), "nf4"),
    ],
)
def test_variant_loses_what_its_base_loses(benchmark, folder, variant, base):
    model = stock_base(folder / base)
    (losses,) = benchmark.measure(variant, 0, STILL)["before"].values()
    assert losses[0] == pytest.approx(loss_of(model, folder), rel=ROUNDING)


def test_kept_share_is_of_weights_and_by_cost(benchmark):
    half = benchmark.measure(Variant("half", share=0.5), 0, STILL)
    assert 0.3 < half["share_in_16_bits"] <= 0.5
    assert half["after"] == half["before"]


def test_training_lowers_the_loss_and_finished_lines_stay(folder, costs):
    record = {"tokens": {"training": 9}, "nats": {"training": costs}, "model_files": {}}
    sensitivities = folder / "costs.json"
    write_checked_json(sensitivities, record | {"device": "cpu", "provenance": provenance()})
    options = {
        "model": folder / "model",
        "tokens": folder / "tokens",
        "sensitivities": sensitivities,
        "output": folder / "bits.jsonl",
        "steps": 6,
        "seeds": 1,
        "learning_rate": 1e-2,
    }
    flags = ["--variants", "16 bits", "NF4"]
    done = forked_stage("benchmark_bits", *flags, **options)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in options["output"].read_text().splitlines()]
    assert all(sum(*row["after"].values()) < sum(*row["before"].values()) for row in rows)
    assert finished(options["output"]) == {("16 bits", 0), ("NF4", 0)}
    again = forked_stage("benchmark_bits", *flags, **options)
    assert len(options["output"].read_text().splitlines()) == 2
    lines = [line.split(",") for line in again.stdout.splitlines()]
    assert [line[1] for line in lines[1:]] == ["16 bits", "NF4"] * 2, "before, and after"


def lines_of(losses, *, seeds):
    """Lines of two bases; losses: of NF4 above 16 bits, by document."""
    numbers = {"16 bits": [0.0] * len(losses), "NF4": losses}
    return [
        {
            "model": "model",
            "variant": variant,
            "seed": seed,
            "share_in_16_bits": 0.0,
            "tokens": {"text": [2] * len(losses)},
            "before": {"text": values},
            "after": {"text": values},
        }
        for variant, values in numbers.items()
        for seed in range(seeds)
    ]


def test_documents_make_an_interval_and_seeds_do_not_narrow_it():
    losses = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]
    one, three = (table(lines_of(losses, seeds=seeds))[-1] for seeds in (1, 3))
    assert one[8] == "4.5000"
    assert float(one[9]) < 4.5 < float(one[10])
    assert (one[5], three[5]) == (1, 3)
    assert one[6:] == three[6:]

"""Every family of the table: what the engine trains is what stock Transformers and PEFT would, with
packed documents and without, on one process and two; what is exported is read by both."""

import re
from copy import deepcopy
from functools import cache, partial

import pytest
import torch

from tests.support.captures import ALONE
from tests.support.distributed import run_in_group
from tests.support.families import FAMILIES, RECURRENT, RECURRENT_EXPERTS, by_kind
from tests.support.family_runs import (
    LENGTHS,
    LOSS,
    attention_of,
    exported,
    family_store,
    in_float64,
    make_bases,
    merge,
    names_of,
    original_of,
    rows_as_documents,
    run_families,
    stock_attention,
    stock_gradients,
    stock_model,
)
from tests.support.models import adapted, stock_base
from tests.support.rounding import allowed, assert_rounded, lost
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.model import prepared_decoder
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError
from workflow.lib.training.startup_checks import check_attention

CPU = torch.device("cpu")

every_family = pytest.mark.parametrize("family", by_kind())


@pytest.fixture(scope="module")
def families(request):
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {call.params.get("family") for call in calls if call is not None}
    return [family for family in FAMILIES if family in chosen | {"glm4_moe"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, families):
    return make_bases(tmp_path_factory.mktemp("families"), families)


@pytest.fixture(scope="module")
def found(folder, families):
    """Losses and gradients by number of processes and family."""
    alone = partial(run_families, break_checks=True)
    return {
        1: run_in_group(alone, folder, None, families, world_size=1)[0],
        2: run_in_group(run_families, folder, "of-2", families, world_size=2)[0],
    }


@cache
def stock_64(folder):
    """Return the stock model of a family in fp64, with the exported adapter; never change it."""
    return in_float64(stock_model(folder, exported(folder / "of-2")))


def by_rows(model):
    return {rows: stock_gradients(model, family_store(rows)) for rows in LENGTHS}


@cache
def stock(folder):
    """Return what that computes, and what ours may lose to it."""
    exact = by_rows(stock_64(folder))
    in_float32 = by_rows(stock_model(folder, exported(folder / "of-2")))
    losses = (
        lost(in_float32[rows]["gradients"][name], gradient)
        for rows, found in exact.items()
        for name, gradient in found["gradients"].items()
    )
    return exact, allowed(losses)


def of_family(found, family, processes):
    result = found[processes][family]
    assert not isinstance(result, str), result
    return dict(result)


def assert_equals_stock(ours, place):
    names = names_of(place / "of-2")
    exact, share = stock(place)
    for rows, theirs in exact.items():
        assert ours[rows]["loss"] == pytest.approx(theirs["loss"], rel=LOSS), rows
        gradients = {names.exported(n): x for n, x in ours[rows]["gradients"].items()}
        assert_rounded(gradients, theirs["gradients"], share=share)


@every_family
@pytest.mark.parametrize("processes", [1, 2])
def test_losses_and_gradients_are_those_of_the_stock_model(folder, found, family, processes):
    ours = of_family(found, family, processes)
    assert all(ours["checks"])
    assert_equals_stock(ours, folder / family)


@pytest.mark.parametrize(
    ("processes", "fused"), [(3, True), (1, False)], ids=["three processes", "not fused"]
)
def test_shared_experts_train_the_same(folder, found, processes, fused):
    of_family(found, "glm4_moe", 2)
    run = partial(run_families, fused=fused)
    results = run_in_group(run, folder, None, ("glm4_moe",), world_size=processes)
    ours = results[0]["glm4_moe"]
    assert not isinstance(ours, str), ours
    assert all(ours["checks"])
    assert bool(ours["fused"]) is fused
    assert_equals_stock(ours, folder / "glm4_moe")


@every_family
def test_checkpoint_is_described(folder, family):
    """By the names under which Transformers writes it, as it was published."""
    shape = describe_checkpoint(Checkpoint.open(folder / family / "original"))
    config = FAMILIES[family].config(family).get_text_config()
    assert (shape.family, shape.source_dtype) == (config.model_type, "F32")
    assert shape.num_layers == config.num_hidden_layers


@every_family
def test_every_value_that_linears_share_is_taken(found, family):
    run = of_family(found, family, 1)
    assert run["shared"] == (run["fused"].get("projections", 0), True)


REFUSED = r"packed documents of \w+ have other hidden states than each by itself.* data\.packing to"


@every_family
def test_start_up_check_finds_attention_to_the_document_before(found, family):
    """Broken by positions that run through the row."""
    run = of_family(found, family, 1)
    assert all(run["checks"])
    assert re.search(REFUSED, run["broken"]["joined, packed"])
    assert run["broken"]["joined, unpacked"] == ""


def test_start_up_check_names_flex_where_masks_leave_out_documents(tmp_path):
    base = make_bases(tmp_path, ["afmoe"]) / "afmoe" / "nf4"
    training = adapted(base, attention="sdpa", r=2).eval()
    with pytest.raises(UserError, match=r"Set model\.attention to flex, or data\.packing to false"):
        check_attention(training, family_store("packed"), ALONE)


@pytest.mark.parametrize("family", by_kind([*RECURRENT, *RECURRENT_EXPERTS]))
def test_start_up_check_finds_a_state_of_the_document_before(found, family):
    run = of_family(found, family, 1)
    assert "recurrent layers take documents one by one" in " ".join(run["details"])
    assert re.search(REFUSED, run["broken"]["states"])


def test_start_up_check_finds_a_state_that_adds_up_over_layers(tmp_path, monkeypatch):
    """In bf16, whose bound for one layer is wider than what a state of Falcon H1 adds there."""
    base = make_bases(tmp_path, ["falcon_h1"]) / "falcon_h1" / "nf4"
    training = adapted(base, attention=attention_of(base), dtype=torch.bfloat16, r=2).eval()
    assert check_attention(training, family_store("packed"), ALONE).passed
    monkeypatch.setattr(prepared_decoder, "documents_in", rows_as_documents)
    with pytest.raises(UserError, match=REFUSED):
        check_attention(training, family_store("packed"), ALONE)


@every_family
def test_stock_packages_reload_base_and_adapter_as_they_were_trained(folder, found, family):
    of_family(found, family, 2)
    run, base = folder / family / "of-2", folder / family / "nf4"
    attention = stock_attention(base)
    model = stock_base(base, attention=attention)
    tuned = load_adapter(model, Adapter(exported(run)))
    parity = compare_logits(
        tuned, run / "parity.safetensors",
        adapter=Adapter(run / "exported"), compute_dtype=torch.float32, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    assert parity.passed
    assert parity.adapter_effect > 100 * parity.tolerance


@every_family
def test_stock_transformers_reloads_the_merged_model(folder, found, family, tmp_path):
    """Every tensor is that of PEFT's own merge, or the original's where no adapter is."""
    of_family(found, family, 2)
    place = folder / family
    merge(place, place / "of-2", tmp_path / "merged", onto="dequantized")
    model = original_of(place).model
    merged, report = auto_class(model.config).from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values())
    theirs = deepcopy(stock_64(place)).merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=2**-7, atol=1e-6)

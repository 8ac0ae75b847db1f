"""Every family of the table: what the engine trains is what stock Transformers and PEFT would, with
packed documents and without, on one process and two; what is exported is read by both.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.distributed import run_distributed
from tests.support.families import FAMILIES, RECURRENT
from tests.support.family_runs import (
    LENGTHS,
    attention_of,
    exported,
    family_store,
    make_bases,
    run_families,
    stock_gradients,
    stock_model,
)
from tests.support.models import adapted
from workflow.lib.artifacts.training_record import Check
from workflow.lib.export.adapter_files import merged_tensors, write_merged
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model import document_states, training_module
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.model.published.converted_reader import ModuleNames
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json
from workflow.lib.training.startup_checks import check_attention

CPU = torch.device("cpu")
# fp32 on both sides, sums in another order through two layers; gradients relative to the largest.
LOSS, GRADIENT = 2e-5, 1e-4

every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bases(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    """Losses and gradients by number of processes and family."""
    runs = {n: run_distributed(run_families, folder, f"of-{n}", world_size=n) for n in (1, 2)}
    return {n: results[0] for n, results in runs.items()}


@cache
def stock(folder: Path) -> tuple[PeftModel, dict[str, dict[str, Any]]]:
    """Return the stock model of a family with the exported adapter, and what it computes."""
    model = stock_model(folder, exported(folder / "of-2"))
    return model, {rows: stock_gradients(model, family_store(rows)) for rows in LENGTHS}


def of_family(found: dict[int, dict[str, Any]], family: str, processes: int) -> dict[str, Any]:
    result = found[processes][family]
    assert not isinstance(result, str), result
    return dict(result)


@every_family
@pytest.mark.parametrize("processes", [1, 2])
def test_losses_and_gradients_are_those_of_the_stock_model(
    folder: Path, found: dict[int, dict[str, Any]], family: str, processes: int
) -> None:
    ours = of_family(found, family, processes)
    assert all(ours["checks"])
    for rows, theirs in stock(folder / family)[1].items():
        assert ours[rows]["loss"] == pytest.approx(theirs["loss"], rel=LOSS), rows
        assert ours[rows]["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in theirs["gradients"].items():
            largest = float(gradient.abs().max())
            assert largest > 0, f"{rows}: {name} has no influence, so nothing is compared"
            torch.testing.assert_close(
                ours[rows]["gradients"][name], gradient, rtol=0, atol=GRADIENT * largest
            )


@pytest.fixture
def checked(folder: Path, family: str) -> Callable[[str], Check]:
    """The start-up check of a family's model on one process, for packed or unpacked rows."""
    base = folder / family / "nf4"
    training = adapted(base, attention=attention_of(base), r=2).eval()
    world: Any = SimpleNamespace(device=CPU)
    return lambda rows: check_attention(training, family_store(rows), world)


REFUSED = r"packed documents of \w+ have other hidden states than each by itself.* data\.packing to"


@every_family
def test_start_up_check_finds_attention_to_the_document_before(
    checked: Callable[[str], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken by positions that run through the row."""
    whole = training_module._decoder_inputs

    def joined(*args: Any) -> dict[str, Any]:
        inputs = whole(*args)
        places = torch.arange(inputs["position_ids"].shape[1])
        return inputs | {"position_ids": places.expand_as(inputs["position_ids"])}

    assert checked("packed").passed
    monkeypatch.setattr(training_module, "_decoder_inputs", joined)
    with pytest.raises(UserError, match=REFUSED):
        checked("packed")
    assert checked("unpacked").passed


@pytest.mark.parametrize("family", RECURRENT)
def test_start_up_check_finds_a_state_of_the_document_before(
    checked: Callable[[str], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "recurrent layers take documents one by one" in checked("packed").detail
    monkeypatch.setattr(document_states, "documents_of", lambda positions: None)
    with pytest.raises(UserError, match=REFUSED):
        checked("packed")


@every_family
def test_stock_packages_reload_base_and_adapter_as_they_were_trained(
    folder: Path, found: dict[int, dict[str, Any]], family: str
) -> None:
    of_family(found, family, 2)
    run, base = folder / family / "of-2", folder / family / "nf4"
    attention = attention_of(base)
    model = load_base(base, device=CPU, compute_dtype=torch.float32, attention=attention)
    tuned = load_adapter(model, exported(run))
    parity = compare_logits(
        tuned, run / "parity.safetensors",
        exported=run / "exported" / ADAPTER_WEIGHTS, compute_dtype=torch.float32, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    assert parity.passed
    assert parity.adapter_effect > 100 * parity.tolerance


@every_family
def test_stock_transformers_reloads_the_merged_model(
    folder: Path, found: dict[int, dict[str, Any]], family: str, tmp_path: Path
) -> None:
    """Every tensor is that of PEFT's own merge, or the original's where no adapter is."""
    of_family(found, family, 2)
    place = folder / family
    adapter, config = exported(place / "of-2"), read_json(place / "of-2" / "adapter_config.json")
    names = ModuleNames(build_on_meta(place / "original", dtype=torch.bfloat16))
    with (
        CheckpointReader(place / "original") as original,
        CheckpointReader(place / "nf4") as nf4,
        CheckpointReader(adapter, single=ADAPTER_WEIGHTS) as trained,
    ):
        tensors = merged_tensors(
            {name: trained.tensor(name) for name in trained.names()}, config,
            original=original, nf4=nf4, onto="dequantized", module_name=names.of,
        )  # fmt: skip
        write_merged(tensors, place / "original", tmp_path / "merged", settings=ExportConfig())
    merged, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values())
    theirs = stock_model(place, adapter).merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=2**-7, atol=1e-6)

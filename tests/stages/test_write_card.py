"""The stage that writes the model card: from the artifacts of a run to `README.md`."""

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.report_examples import edit, quantization, write_run
from workflow.lib.system.files import write_checked_json


def write_card(root, **data):
    run = root / "runs" / "demo"
    (root / "base").mkdir(exist_ok=True)
    write_checked_json(root / "base" / "quantization.json", quantization())
    return forked_stage(
        "write_card",
        config={"model": {"source": "example/base-8b"}, "data": data},
        summary=run / "finetune" / "summary.json",
        adapter_config=run / "consolidate" / "adapter" / "adapter_config.json",
        base=root / "base",
        manifest=root / "tokens" / "demo-data" / "manifest.json",
        parity=run / "consolidate" / "parity.json",
        evaluation=run / "evaluate_run",
        output=root / "README.md",
    )


@pytest.mark.parametrize(
    ("data", "linked"),
    [({"name": "mine"}, ""), ({"source": "acme/questions"}, "datasets: acme/questions\n")],
)
def test_stage_writes_the_card_with_hub_ids_linked(tmp_path, data, linked):
    write_run(tmp_path, "demo", num_steps=3)
    done = write_card(tmp_path, **data)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nbase_model: example/base-8b\n")
    assert "\nbase_model_relation: adapter\n" in card
    assert ("datasets:" in card) == bool(linked)
    assert linked in card


def test_card_has_licences_energy_and_task_items_in_training_rows(tmp_path):
    run = write_run(tmp_path, "demo", num_steps=3)
    edit(run / "finetune" / "summary.json", lambda document: document.update(energy_j=7.2e6))
    assert write_card(tmp_path).returncode == 0
    card = (tmp_path / "README.md").read_text()
    assert "licence: apache-2.0 |" in card
    assert "| Licence | not named |" in card
    assert ", 2 kWh |" in card
    assert "of 4 items, 2 have 20% or more of their tokens in training rows, 1 have 80%; 1 " in card

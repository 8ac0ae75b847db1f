"""The stage that writes the model card: from the artifacts of a run to `README.md`."""

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.report_examples import quantization, write_run
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

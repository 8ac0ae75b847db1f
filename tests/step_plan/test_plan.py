"""The description of a step, as `preflight.json` holds it."""

from dataclasses import asdict

import pytest

from tests.support.plans import make_forecast, make_plan
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json

PLAN = make_plan(
    ranks={"v_proj": 2},
    routers=("mlp.gate",),
    activation_checkpointing=0.625,
    offload_activations=3,
)


def written(path, plan):
    document = make_forecast(plan=PLAN).as_json() | {"provenance": Provenance.now().as_json()}
    write_checked_json(path, document | {"plan": plan})
    return path


def test_plan_is_read_from_its_file_as_it_was(tmp_path):
    assert read_record(written(tmp_path / "p.json", asdict(PLAN)), Preflight).plan == PLAN


@pytest.mark.parametrize("name", ["offload_layers", "objective"])
def test_file_whose_plan_lacks_a_field_is_refused_with_what_to_do(tmp_path, name):
    plan = asdict(PLAN)
    del plan[name]
    with pytest.raises(
        UserError, match=f"the field plan.{name} is missing.*snakemake --cores all preflight"
    ):
        read_record(written(tmp_path / "p.json", plan), Preflight)

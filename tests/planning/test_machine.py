"""The machine that a plan is made for."""

import pytest

from workflow.lib.planning.machine import check_place
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize(
    ("settings", "here", "said"),
    [
        ({"gpus": 1, "nodes": 2}, True, "hardware.nodes = 2 .run demo.: this machine is one node"),
        ({"gpus": "auto"}, False, "hardware.gpus = 'auto' .run demo.: the GPUs of a cluster"),
    ],
)
def test_settings_that_do_not_suit_where_jobs_run_are_refused(settings, here, said):
    hardware = HardwareConfig.model_validate(settings)
    with pytest.raises(UserError, match=said):
        check_place("demo", hardware, in_job=here, elsewhere=not here)
    check_place("demo", hardware, in_job=False, elsewhere=False)  # within a job of a cluster

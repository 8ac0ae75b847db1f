"""The launcher beside NCCL: a process that fails or dies while the other waits for it on a GPU."""

import pytest

from tests.support.launch_worker import NCCL
from tests.support.refusals import refusal
from workflow.lib.training.launch import Workers, launch_workers

pytestmark = pytest.mark.gpu

CAUSES = {"fail in 1 beside a collective": "KeyError: 'a defect'", "die in 1": "killed by SIGKILL"}


@pytest.mark.parametrize(("behaviour", "cause"), CAUSES.items(), ids=CAUSES)
def test_process_that_fails_beside_nccl_is_named_with_its_cause(
    tmp_path, two_gpus, behaviour, cause
):
    arguments = [NCCL + behaviour, str(tmp_path)]
    workers = Workers("tests.support.launch_worker", arguments, processes=two_gpus)
    lines = refusal(launch_workers, workers).splitlines()
    assert lines[0].startswith(cause)
    assert lines[-1].startswith("(training: process 1 of 2, the first to fail;")

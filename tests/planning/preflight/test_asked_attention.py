"""An attention that is asked for by name and cannot run is refused before any work."""

import pytest

from tests.support.models import tiny_llama
from tests.support.settings_examples import only
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.planning.preflight.checks import check_settings
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "varlen"])
def test_attention_of_gpus_is_refused_on_a_cpu_with_the_settings(tmp_path, name):
    shape = describe_checkpoint(Checkpoint.open(tiny_llama(tmp_path)))
    run = only({"model": {"attention": name}, "hardware": {"gpus": 0}, "data": {"seq_len": 16}})
    with pytest.raises(UserError, match=rf"model\.attention = '{name}': it needs a GPU"):
        check_settings(run, shape, {}, trains_here=False)

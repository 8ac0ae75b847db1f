"""Models are described and recorded where a package of kernels is installed that needs a GPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.other_decoders import config_of
from workflow.lib.system.files import write_json

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
def chunk_gated_delta_rule(*tensors, **others):
    raise RuntimeError("a kernel was launched by the address of a tensor that has none")

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
LOOK = """
import json, sys
from pathlib import Path
from tests.support.preflight_examples import setup
from workflow.lib.model.describe_model import describe_file
from workflow.lib.recording.recording_process import _recorded

config = Path(sys.argv[1])
recurrent = [layer.recurrent for layer in describe_file(config).kinds]
levers = setup(seq_len=128, micro_batch_size=1, processes=1, targets=("q_proj",))
config = json.loads(config.read_text())
print(recurrent, len(_recorded(config, levers, checked=False, whole=True).events) > 100)
"""


def package_of_kernels(folder):
    """Write a package like flash-linear-attention, whose kernels cannot run here."""
    inner = folder / "fla" / "ops" / "gated_delta_rule"
    inner.mkdir(parents=True)
    (folder / "fla" / "__init__.py").write_text('__version__ = "9.9"\n')
    (inner.parent / "__init__.py").touch()
    (inner / "__init__.py").write_text(KERNEL)


def test_recurrent_model_is_described_and_recorded_without_the_kernels(tmp_path):
    package_of_kernels(tmp_path / "site")
    write_json(tmp_path / "config.json", config_of("qwen3_5_text"))
    found = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path / "config.json")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert found.split("\n")[-2] == "[True, False] True"

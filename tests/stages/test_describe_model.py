"""The stage from the command line: a description, or one message."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.forked_stage import forked_stage
from tests.support.preflight_examples import TINY, write_checkpoint
from workflow.lib.model.architecture.model_shape import read_shape
from workflow.lib.model.describe_model import describe_folder
from workflow.lib.system.files import file_sha256


def describe(folder: Path, **runs: Any) -> subprocess.CompletedProcess[str]:
    """Run the stage on the model in `folder`, with the settings of runs."""
    checks = json.dumps({"trains_here": False, "runs": runs})
    options = ["--model", str(folder), "--checks", checks]
    output = ["--output", str(folder / "made" / "description.json")]
    return forked_stage("describe_model", *options, *output)


def test_description_is_that_of_the_folder_and_says_of_which_config_it_is(tmp_path: Path) -> None:
    done = describe(write_checkpoint(tmp_path), demo={"data": {"seq_len": 128}})
    assert done.returncode == 0, done.stderr
    shape = read_shape(tmp_path / "made" / "description.json")
    assert shape == describe_folder(tmp_path)
    assert shape.config_sha256 == file_sha256(tmp_path / "config.json")
    assert "llama: 25,890 parameters, 3 decoder layers (3 x full attention)" in done.stderr


def refused(folder: Path, *parts: str, **runs: Any) -> None:
    """Assert exit status 1, one message with all parts, and no output."""
    done = describe(folder, **runs)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr.splitlines()[-1]
    assert not (folder / "made" / "description.json").exists()


def test_run_whose_settings_do_not_suit_the_model_is_refused(tmp_path: Path) -> None:
    long = {"data": {"seq_len": 131}}
    refused(
        write_checkpoint(tmp_path),
        "run long: data.seq_len = 131",
        good={"data": {"seq_len": 128}},
        long=long,
    )


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config=TINY | {"intermediate_size": 48})
    refused(folder, "mlp.gate_proj.weight has shape [46, 30]", "config.json says [48, 30]")


def test_model_that_is_not_covered_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config=TINY | {"model_type": "t5"})
    refused(folder, "model_type = 't5' is an encoder-decoder")

"""The stage from the command line: a description, or one message."""

from safetensors.torch import load_file, save_file

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.mixtures import tiny_mixture
from tests.support.preflight_examples import TINY, write_checkpoint
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.architecture.model_shape import read_shape
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.files import file_sha256


def describe(folder, **runs):
    checks = {"trains_here": False, "runs": runs}
    output = folder / "made" / "description.json"
    return forked_stage("describe_model", model=folder, checks=checks, output=output)


def test_description_is_that_of_the_folder_and_says_of_which_config_it_is(tmp_path):
    done = describe(write_checkpoint(tmp_path), demo={"data": {"seq_len": 128}})
    assert done.returncode == 0, done.stderr
    shape = read_shape(tmp_path / "made" / "description.json")
    assert shape == describe_checkpoint(Checkpoint.open(tmp_path))
    assert shape.config_sha256 == file_sha256(tmp_path / "config.json")
    assert "llama: 25,890 parameters, 3 decoder layers (3 x full attention)" in done.stderr


def refused(folder, *parts, **runs):
    """Assert exit status 1, one message with all parts, and no output."""
    done = describe(folder, **runs)
    said = refusal_of(done, output=folder / "made" / "description.json").splitlines()[-1]
    assert all(part in said for part in parts), said


def test_run_whose_settings_do_not_suit_the_model_is_refused(tmp_path):
    long = {"data": {"seq_len": 131}}
    refused(
        write_checkpoint(tmp_path),
        "run long: data.seq_len = 131",
        good={"data": {"seq_len": 128}},
        long=long,
    )


def test_model_that_is_not_covered_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, config=TINY | {"model_type": "t5"})
    refused(folder, "model_type = 't5' is an encoder-decoder")


def test_checkpoint_without_some_experts_is_refused(tmp_path):
    file = tiny_mixture("qwen3_moe", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    rest = {name: x for name, x in tensors.items() if "layers.1.mlp.experts.7." not in name}
    save_file(rest, file, metadata={"format": "pt"})
    refused(tmp_path, "has 10 tensors mlp.experts.*.down_proj.weight", "says 11 experts")

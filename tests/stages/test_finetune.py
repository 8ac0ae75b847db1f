"""The stage reads no base and no tokens that were damaged, and says that it looked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.distributed import run_distributed
from tests.support.finished import arguments, finetune, prepare
from tests.system.test_checksums import flip, flip_tensor
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json


def refused_training(folder: Path) -> str:
    """Be a worker of the stage, on files that were damaged before; return the message."""
    try:
        finetune(arguments(folder))
    except UserError as error:
        return str(error)
    return "no error"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def flip_weight(folder: Path) -> Path:
    return flip_tensor(folder / "base", "model.layers.1.mlp.up_proj.weight")


def change_setting(folder: Path) -> Path:
    path = folder / "base" / "config.json"
    text = path.read_text()
    assert text.count('"rms_norm_eps": 1e-06') == 1
    path.write_text(text.replace("1e-06", "9e-06"))
    return path


def flip_byte(name: str, place: int) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        flip(folder / name, place)
        return folder / name

    return damage


DAMAGES = {  # all of which open as before, and train to the end
    "packed weight": flip_weight,
    "setting of the base": change_setting,
    "token": flip_byte("tokens/train.input_ids.npy", -4),
    "position": flip_byte("tokens/train.position_ids.npy", -4),
    "loss mask": flip_byte("tokens/train.loss_mask.npy", -1),
    "held-out token": flip_byte("tokens/heldout.input_ids.npy", -4),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_bit_of_base_or_tokens_stops_all_processes_before_the_model_is_loaded(prepared, damage):
    path = DAMAGES[damage](prepared)
    messages = run_distributed(refused_training, prepared, world_size=2)
    assert set(messages) == {
        f"{path} is damaged: it does not have the SHA-256 that was recorded when it was made. "
        f"Delete the folder {path.parent} and repeat the command; the folder is made again."
    }
    assert not (prepared / "finetune").exists()
    assert list((prepared / "checkpoints").glob("*/step-*")) == []


def test_summary_tells_that_the_files_were_compared_with_their_record(prepared):
    run_distributed(finetune, arguments(prepared), world_size=2)
    first, *others = read_checked_json(prepared / "finetune" / "summary.json")["checks"]
    files = [*(prepared / "base").glob("*[!S]"), *(prepared / "tokens").glob("*.npy")]
    assert first == {
        "name": "base and tokens have their recorded SHA-256",
        "passed": True,
        "detail": f"{len(files)} files, {sum(p.stat().st_size for p in files):,} bytes",
    }
    assert any("gathered bytes equal checkpoint bytes" in check["name"] for check in others)

"""No code from data, models or tasks is run, and no pickle is read."""

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.checkpoints.checkpoint import Checkpoint, loaded_tensors
from workflow.lib.checkpoints.safetensors_reader import shard_of_tensor
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "workflow" / "lib").rglob("*.py"),
    *(ROOT / "workflow" / "scripts").glob("*.py"),
]
# What calls must say, by a pattern of the called: ruff (pyproject.toml) refuses what may not be
# called at all.
SAID = {
    r"(np|numpy)\.load": ("allow_pickle", "False"),
    r"Auto\w+\.from_\w+": ("trust_remote_code", "False"),
    r"\w+\.extract(all)?": ("filter", "'data'"),
    "compile|__import__": ("", ""),
}


def test_loaders_are_told_to_run_no_code():
    assert len(SOURCES) > 150
    wrong, seen = [], set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            for pattern in SAID:
                if isinstance(node, ast.Call) and re.fullmatch(pattern, called):
                    seen.add(pattern)
                    said = {(word.arg, ast.unparse(word.value)) for word in node.keywords}
                    wrong += [] if SAID[pattern] in said else [f"{path.name}: {called}"]
    assert wrong == []
    assert len(seen) == 3


def test_no_stage_lets_packages_fetch_compiled_code_from_a_hub(tmp_path):
    """The package by which they do so, `kernels`, is not there for them even if it is installed."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise SystemExit('kernels was imported')")
    look = (
        "import workflow.scripts, importlib.util as u; print(u.find_spec('kernels')); import "
        "kernels"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.stdout == "None\n"
    assert "ModuleNotFoundError" in done.stderr


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "consolidated.00.ckpt"]
)
def test_base_in_a_pickle_is_refused_and_not_read(tmp_path, name):
    target = tmp_path / "here"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Bomb(target)))
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UserError, match=rf"model\.source = .*: it has only {name}.*safetensors"):
        loaded_tensors(tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.source"):
        shard_of_tensor(tmp_path / "model")
    assert not target.exists()


def test_pickle_under_a_safetensors_name_is_refused_and_not_read(tmp_path):
    target = tmp_path / "here"
    torch.save(Bomb(target), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UserError, match="is not a safetensors file"):
        loaded_tensors(tmp_path)
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        shard_of_tensor(tmp_path)
    assert not target.exists()


def test_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    tiny_llama(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names 1 of 1 files that are not beside it"):
        shard_of_tensor(folder)


def custom_model(folder, target):
    """Write a model and a tokenizer whose classes are code in their folder, which writes a file
    when imported."""
    tiny_llama(folder)
    tiny_tokenizer(folder)
    (folder / "custom.py").write_text(f"from pathlib import Path\nPath({str(target)!r}).touch()\n")
    classes = {
        "config.json": {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["custom.Tokenizer", "custom.Tokenizer"]},
    }
    for name, auto_map in classes.items():
        content = json.loads((folder / name).read_text())
        changes = {
            "auto_map": auto_map,
            "model_type": "custom",
            "tokenizer_class": "CustomTokenizer",
        }
        (folder / name).write_text(json.dumps(content | changes))
    return folder


def test_model_with_code_of_its_own_is_refused_and_its_code_not_run(tmp_path):
    target = tmp_path / "here"
    folder = custom_model(tmp_path / "model", target)
    with pytest.raises(UserError, match=r"code of the model's own repository.*never run"):
        describe_checkpoint(Checkpoint.open(folder))
    with pytest.raises(UserError, match=r"code of its own repository, which is never run"):
        Checkpoint(folder).build(torch.float32)
    assert not target.exists()


def test_tokenizer_with_code_of_its_own_is_never_run(tmp_path):
    target = tmp_path / "here"
    folder = custom_model(tmp_path / "model", target)
    with pytest.raises(UserError, match=r"code of the model's repository, which is never run"):
        load_tokenizer(folder)
    assert not target.exists()

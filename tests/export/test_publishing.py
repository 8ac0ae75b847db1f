"""What of this machine is found in files that are to be uploaded."""

import json

import pytest

from workflow.lib.export.publishing import CHUNK, named_paths, private_folders

PRIVATE = [
    "/mnt/client/models/acme",
    "/data/acme",
    "/scratch/u1/acme",
    "../../client/model",
    "./../client",
    "~/models/acme",
    "~other/models",
    "file:///srv/x",
    "D:\\models\\acme",
    "\\\\server\\share",
]
PUBLIC = ["acme/tiny", "/think", "</s>", "https://huggingface.co/acme/tiny", "a/b or /c/d\n", ""]


@pytest.mark.parametrize("value", PRIVATE)
@pytest.mark.parametrize("name", ["adapter_config.json", "config.json", "tokenizer_config.json"])
def test_value_that_is_a_path_out_of_the_folder_is_named(tmp_path, name, value):
    path = tmp_path / name
    path.write_text(json.dumps({"r": 8, "inner": [{"_name_or_path": value}]}))
    (said,) = named_paths(path)
    assert value in said


@pytest.mark.parametrize("value", PUBLIC)
def test_value_that_is_no_path_of_a_machine_passes(tmp_path, value):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"pad_token": value}))
    assert [*named_paths(path)] == []


@pytest.mark.parametrize("value", ["/models", "model", "", "my models/acme"])
def test_base_that_is_no_id_of_the_hub_is_named(tmp_path, value):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"base_model_name_or_path": value}))
    (said,) = named_paths(path)
    assert "no id of the hub" in said


@pytest.mark.parametrize("start", [0, CHUNK - 3, 3 * CHUNK])
@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "Modelfile", "merges.txt"])
def test_own_folder_is_found_wherever_it_stands_in_a_file_of_any_size(tmp_path, name, start):
    path = tmp_path / name
    path.write_text("y" * start + f" {private_folders()[0]}x " + "z" * CHUNK)
    assert [*named_paths(path)] == [f"{private_folders()[0]}, a folder of this machine"]


def test_of_weights_the_head_is_searched(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + private_folders()[0].encode())
    assert len([*named_paths(path)]) == 1
    path.write_bytes(b"GGUF" + bytes(2 * CHUNK))
    assert [*named_paths(path)] == []

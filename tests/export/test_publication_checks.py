"""What must not be uploaded is found in files of every kind."""

import json
import struct
from pathlib import Path

import pytest

from workflow.lib.export.publishing import CHUNK, obstacles, private_folders

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
PATH, TOKEN = "/mnt/client/secret/model", f"hf_{'abcdefgh' * 4}"


def safetensors(metadata: dict[str, str]) -> bytes:
    header = json.dumps({"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(100)


def gguf(**texts: str) -> bytes:
    """Return GGUF metadata: a number, an array of texts, and these texts."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    number = text("number") + struct.pack("<II", 4, 7)
    tokens = text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("/home/x/y") + text("b")
    entries = [text(key) + struct.pack("<I", 8) + text(value) for key, value in texts.items()]
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2 + len(texts))
    return head + number + tokens + b"".join(entries) + bytes(100)


def found(path: Path, content: str | bytes, **environment: str) -> list[str]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [*obstacles(path, environment=environment)]


@pytest.mark.parametrize("value", PRIVATE)
@pytest.mark.parametrize("name", ["adapter_config.json", "config.json", "tokenizer_config.json"])
def test_value_that_is_a_path_out_of_the_folder_is_named(tmp_path, name, value):
    document = {"r": 8, "inner": [{"_name_or_path": value}]}
    (obstacle,) = found(tmp_path / name, json.dumps(document))
    assert value in obstacle


@pytest.mark.parametrize("value", PUBLIC)
def test_value_that_is_no_path_of_a_machine_passes(tmp_path, value):
    assert found(tmp_path / "tokenizer_config.json", json.dumps({"pad_token": value})) == []


@pytest.mark.parametrize("value", ["/models", "model", "", "my models/acme"])
def test_base_that_is_no_id_of_the_hub_is_named(tmp_path, value):
    document = json.dumps({"base_model_name_or_path": value})
    (obstacle,) = found(tmp_path / "adapter_config.json", document)
    assert "no id of the hub" in obstacle


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", json.dumps({"x": [[PATH, 1]]})),
        ("config.json", json.dumps({PATH: 1})),
        ("config.json", json.dumps({"x": f"made from {PATH} today"})),
        ("chat_template.jinja", f"{{# {PATH} #}}"),
        ("README.md", f"trained on ({PATH})"),
        ("items.jsonl", json.dumps({"x": PATH}) + "\n" + json.dumps({"y": 1})),
        ("notes.txt", f"see file://{PATH}"),
        ("adapter_model.safetensors", safetensors({"a": "y" * CHUNK, "p": PATH})),
        ("model.gguf", gguf(a="y" * CHUNK, p=PATH)),
    ],
)
def test_path_is_found_anywhere_in_a_file(tmp_path, name, content):
    (obstacle,) = found(tmp_path / name, content)
    assert PATH in obstacle


@pytest.mark.parametrize("text", [TOKEN, "https://bob:hunter2secret@internal.example/x"])
@pytest.mark.parametrize("name", ["generation_config.json", "README.md", "model.gguf"])
def test_password_or_token_is_found(tmp_path, name, text):
    contents = {".json": json.dumps({"x": text}), ".md": text, ".gguf": gguf(x=text)}
    (obstacle,) = found(tmp_path / name, contents[Path(name).suffix])
    assert "a password or token" in obstacle


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "adapter_model.safetensors"])
def test_value_of_a_secret_variable_is_found_without_being_shown(tmp_path, name):
    value = "swordfish-123"
    content = safetensors({"x": value}) if name.endswith("tensors") else f'{{"x": "{value}"}}'
    (obstacle,) = found(tmp_path / name, content, MY_SECRET_TOKEN=value)
    assert obstacle == "the value of a secret variable"


@pytest.mark.parametrize("name", ["extra.bin", "modeling_evil.py", "state.pt", "a.pkl", "x.so"])
def test_file_that_may_hold_code_is_refused(tmp_path, name):
    (obstacle,) = found(tmp_path / name, "x")
    assert "which no loader of this model needs" in obstacle


@pytest.mark.parametrize("start", [0, CHUNK - 3, 3 * CHUNK])
@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_own_folder_is_found_wherever_it_stands_in_a_file_of_any_size(tmp_path, name, start):
    content = "y" * start + f" {private_folders()[0]}/x " + "z" * CHUNK
    words = f"{private_folders()[0]}, a folder of this machine"
    assert found(tmp_path / name, content) == [words]


@pytest.mark.parametrize("name", ["model.gguf", "adapter_model.safetensors"])
def test_weights_and_tokens_are_no_texts(tmp_path, name):
    head = gguf(x="plain") if name.endswith("gguf") else safetensors({"x": "plain"})
    assert found(tmp_path / name, head + PATH.encode() + TOKEN.encode()) == []
    assert found(tmp_path / "tokenizer.json", json.dumps({"vocab": {PATH: 1, TOKEN: 2}})) == []

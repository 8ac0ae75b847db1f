"""Files that are not YAML, or not what their author thinks: named with file and line."""

import os

import pytest

from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.system.errors import UserError

NO_SETTINGS = {
    "key twice": (
        "train:\n  seed: 1\nlora: {r: 2}\ntrain:\n  seed: 2\n",
        4,
        "the key train stands",
    ),
    "key of a run twice": (
        "runs:\n  a:\n    train:\n      seed: 1\n      seed: 2\n",
        5,
        "the key runs.a.train.seed stands",
    ),
    "key within a list twice": (
        "data:\n  train:\n    - path: a\n      path: b\n",
        4,
        "data.train.path",
    ),
    "tab": ("train:\n\tseed: 1\n", 2, "indent with spaces"),
    "open bracket": ("a: 1\nb: [1,\n", 3, "this is no YAML"),
    "unknown tag": ("a: 1\nb: !include c\n", 2, "this is no YAML"),
    "number of base 8": ("a: 1\ntrain: {seed: 010}\n", 2, "YAML reads 010 as 8. Write 8, or put"),
    "number of base 60": ("a:\n- -1:30\n", 2, "YAML reads -1:30 as -90. Write -90"),
    "JSON with a key twice": ('{\n\t"seed": 1,\n\t"seed": 2\n}\n', 3, "the key seed stands"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize(("text", "line", "said"), NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_mistake_of_yaml_is_named_with_file_and_line(path, text, line, said):
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        check_yaml(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "# nothing yet\n",
        "a: [0, -0, 0.5, 00.5, 1_000, 0x10, 1e-4, '010', \"1:30\", 2026-01-01, 08]\n",
        "x-fast: &fast {train: {seed: 1}}\nruns:\n  a: *fast\n  b: {<<: *fast, lora: {r: 2}}\n",
    ],
    ids=["empty", "numbers as they look, texts in quotes", "anchors, merged keys, keys elsewhere"],
)
def test_what_is_no_mistake_passes(path, text):
    path.write_text(text)
    check_yaml(path)


def test_file_that_is_no_text_is_named(path):
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"mine\.yaml: it is no UTF-8 text"):
        check_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        "train: &a {x: *a}\n",
        "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 9)}]\n" for n in range(9)),
        "data: 2024-99-99\n",
    ],
    ids=["anchor in itself", "aliases of aliases", "date that is none"],
)
def test_what_no_reader_could_walk_is_refused_before_anything_does(path, text):
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: it cannot be read as YAML"):
        check_yaml(path)


def test_pipe_is_refused_at_once(path):
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"mine\.yaml: it is a pipe"):
        check_yaml(path)

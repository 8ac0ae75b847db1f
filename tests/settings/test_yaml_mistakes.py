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


@pytest.mark.parametrize(("text", "line", "said"), NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_mistake_of_yaml_is_named_with_file_and_line(tmp_path, text, line, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        check_yaml(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert said in str(caught.value)


def test_an_empty_file_holds_no_mistake(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# nothing yet\n")
    assert check_yaml(path) is None


def test_numbers_as_they_look_and_texts_in_quotes_are_no_mistakes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: [0, -0, 0.5, 00.5, 1_000, 0x10, 1e-4, '010', \"1:30\", 2026-01-01, 08]\n")
    check_yaml(path)


def test_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"mine\.yaml: it is no UTF-8 text"):
        check_yaml(path)


def test_anchors_merged_keys_and_the_same_key_elsewhere_are_no_mistakes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "x-fast: &fast {train: {seed: 1}}\nruns:\n  a: *fast\n  b:\n    <<: *fast\n    lora: {r: "
        "2}\n"
    )
    check_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        "train: &a {x: *a}\n",
        "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 9)}]\n" for n in range(9)),
    ],
)
def test_aliases_without_end_are_refused_before_anything_walks_them(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: it cannot be read as YAML"):
        check_yaml(path)


def test_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match=r"mine\.yaml: it is a pipe"):
        check_yaml(tmp_path / "mine.yaml")


def test_date_that_is_none_is_one_message(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: 2024-99-99\n")
    with pytest.raises(UserError, match=r"mine\.yaml: it cannot be read as YAML"):
        check_yaml(tmp_path / "mine.yaml")

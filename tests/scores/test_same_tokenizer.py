"""A tokenizer of other tokens is refused, by its vocabulary or by what it makes of texts."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers, processors

from tests.support.tiny import tiny_tokenizer
from workflow.lib.scores.scoring import check_same_tokenizer, check_top_k
from workflow.lib.system.errors import UserError

SPLIT = "its tokenizer encodes "
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a token more": (lambda t: t.add_tokens(["new"]), "1 differ, such as 'new' ("),
    "a normalizer": (
        lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.NFC()),
        SPLIT,
    ),
    "a space in front": (
        lambda t: setattr(
            t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
        SPLIT,
    ),
    "a token at the beginning": (
        lambda t: setattr(
            t.backend_tokenizer,
            "post_processor",
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
        ),
        SPLIT,
    ),
}


def check(folder, student):
    check_same_tokenizer(folder, student, setting="distill.teacher", named="a-teacher")


def test_equal_tokenizers_of_two_folders_are_the_same(tmp_path):
    for name in ("student", "teacher"):
        tiny_tokenizer(tmp_path / name)
    check(tmp_path / "teacher", tmp_path / "student")


@pytest.mark.parametrize("change", CHANGES)
def test_tokenizer_of_other_tokens_is_refused(tmp_path, change):
    tiny_tokenizer(tmp_path / "student")
    teacher = tiny_tokenizer(tmp_path / "teacher")
    do, said = CHANGES[change]
    do(teacher)
    teacher.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match=rf"distill.teacher = 'a-teacher': .*{re.escape(said)}"):
        check(tmp_path / "teacher", tmp_path / "student")


def test_folder_without_a_tokenizer_is_named_by_the_setting(tmp_path):
    tiny_tokenizer(tmp_path / "student")
    (tmp_path / "teacher").mkdir()
    with pytest.raises(UserError, match=r"distill.teacher = 'a-teacher': .* cannot be compared"):
        check(tmp_path / "teacher", tmp_path / "student")


def test_as_many_tokens_as_there_are_may_be_stored():
    check_top_k(7, 7)
    with pytest.raises(UserError, match=r"distill.top_k = 8: the vocabulary has 7 tokens"):
        check_top_k(8, 7)

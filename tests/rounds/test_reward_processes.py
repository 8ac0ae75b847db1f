"""The shipped rewards on answers that are nearly right, and users' files."""

import pytest

from workflow.lib.rounds.reward_processes import reward_of
from workflow.lib.settings.rounds import RewardFunction
from workflow.lib.system.errors import UserError

CASES = [
    ("last_number", "So 3 + 4 is 1,007.50.", {"answer": "#### 1007.5"}, {}, 1),
    ("last_number", "It is 7, not 8", {"answer": "7"}, {}, 0),
    ("last_number", "no idea", {"answer": 7}, {}, 0),
    ("last_number", "-.5", {"result": "-0.50"}, {"column": "result"}, 1),
    ("boxed", r"so \boxed{3} or \boxed{\frac{1}{2}}", {"answer": r"\frac{1} {2}"}, {}, 1),
    ("boxed", r"\boxed{12.0}", {"answer": r"thus \boxed{12}"}, {}, 1),
    ("boxed", r"\boxed{12", {"answer": "12"}, {}, 0),
    ("boxed", "12", {"answer": "12"}, {}, 0),
    ("regex", "a\nyes", {}, {"pattern": "^yes$"}, 0),
    ("regex", "a\nyes", {}, {"pattern": "(?m)^yes$"}, 1),
    ("json", '{"a": 1}', {}, {}, 1),
    ("json", '{"a": 1', {}, {}, 0),
    ("json", '{"a": "1"}', {}, {"schema": {"properties": {"a": {"type": "integer"}}}}, 0),
    ("json", '{"a": 1}', {}, {"schema": {"properties": {"a": {"type": "integer"}}}}, 1),
    ("length", "12345", {}, {"at_most": 4}, 0.8),
    ("length", "12345", {}, {"at_least": 10}, 0.5),
    ("length", "12345", {}, {"at_least": 1, "at_most": 5}, 1),
]


@pytest.mark.parametrize(("name", "answer", "row", "options", "expected"), CASES)
def test_shipped_rewards(name, answer, row, options, expected):
    assert reward_of(RewardFunction(function=name, options=options))("", answer, row) == expected


def test_column_without_a_number_is_no_silent_zero():
    with pytest.raises(ValueError, match="the column 'answer' holds no number"):
        reward_of(RewardFunction(function="last_number"))("", "1", {"answer": "none"})


def test_function_of_a_users_file_imports_the_files_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 3")
    (tmp_path / "own.py").write_text(
        "from beside import FACTOR\n"
        "def reward(prompt, answer, row, *, bonus=0):\n"
        "    return FACTOR * len(answer) + bonus\n"
    )
    function = RewardFunction(function=f"{tmp_path}/own.py:reward", options={"bonus": 1})
    assert reward_of(function)("", "ab", {}) == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("a = 1", "has no"),
    ],
)
def test_file_without_the_function_is_refused(tmp_path, content, message):
    (tmp_path / "own.py").write_text(content)
    with pytest.raises(UserError, match=message):
        reward_of(RewardFunction(function=f"{tmp_path}/own.py:reward"))

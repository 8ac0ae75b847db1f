"""The folder of answers: shards that survive a kill, and damage that is named."""

from collections import Counter

import pytest

from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter, read_answers
from workflow.lib.system.errors import UserError

PROMPTS = [
    AnsweredPrompt(
        split="train", file="rows.jsonl", row=n, values={"q": "\u2028"}, prompt=[1, n], text=f"q{n}"
    )
    for n in range(1, 6)
]
ANSWERS = [Answer(ids=[7, 2], log_probs=[-0.1, -1 / 3], finish="stop", text="so\ufffd")] * 256


@pytest.fixture
def writer(tmp_path):
    return lambda facts=0: AnswerWriter(
        tmp_path / "answers", PROMPTS, facts=facts, per_prompt=len(ANSWERS)
    )


def add(writer, shards):
    for shard in shards:
        writer.add(shard, [ANSWERS] * len(shard.prompts))


def finish(writer):
    return writer.finish(sampler="test", model_files={}, left_out=Counter(late=2))


def test_finished_shards_of_a_killed_stage_are_kept(writer):
    first = writer()
    assert [len(shard.prompts) for shard in first.prepare()] == [2, 2, 1]
    add(first, first.shards[:2])
    assert writer().prepare() == first.shards[2:]


def test_shard_cut_off_by_a_kill_and_those_of_other_settings_are_sampled_again(writer, tmp_path):
    first = writer()
    first.prepare()
    add(first, first.shards)
    path = tmp_path / ".answers.partial" / first.shards[1].name
    path.write_bytes(path.read_bytes()[:-20])
    assert writer().prepare() == first.shards[1:2]
    assert writer(facts=1).prepare() == first.shards


def test_answers_are_read_as_they_were_sampled(writer, tmp_path):
    last = writer()
    add(last, last.prepare())
    manifest = finish(last)
    assert (manifest.prompts, manifest.tokens, manifest.left_out) == (5, 2560, {"late": 2})
    assert (manifest.finish, manifest.unreadable) == ({"stop": 1280}, 1280)
    read = read_answers(tmp_path / "answers")
    assert [prompt.model_copy(update={"answers": []}) for prompt in read] == PROMPTS
    assert all(prompt.answers == ANSWERS for prompt in read)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b"0.1", b"0.2", 1),
        lambda content: content[: content[:-1].rindex(b"\n") + 1],
    ],
    ids=["other number", "lost line"],
)
def test_damaged_answers_are_refused(writer, tmp_path, damage):
    last = writer()
    add(last, last.prepare())
    finish(last)
    path = tmp_path / "answers" / last.shards[0].name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"answers-00000\.jsonl is damaged"):
        read_answers(tmp_path / "answers")

"""The stage on a tiny base with an adapter: its answers, their log-probabilities, and a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.rounding import allowed, lost
from tests.support.tiny import tiny_tokenizer
from tests.support.tiny_export import tiny_adapter, tiny_base
from tests.support.tokenizing import Stage, save_rows
from workflow.lib.rounds.answers import read_answers
from workflow.lib.system.files import write_checksums

SETTINGS = {
    "per_prompt": 3,
    "prompts_per_round": 20,
    "heldout_prompts": 4,
    "max_new_tokens": 7,
    "temperature": 0.9,
    "top_p": 0.95,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    tiny_adapter(tiny_base(folder / "base"), folder / "start")
    for name in ("base", "start"):
        write_checksums(folder / name)
    tiny_tokenizer(folder / "base-original")
    Stage(folder, folder / "base-original").run()
    return folder


def sample(
    folder: Path, output: Path, *words: str, data: dict[str, Any] | None = None, **answers: Any
):
    tokenizer = folder / "base-original"
    stage = Stage(folder, tokenizer)
    config = {"data": stage.config()["data"] | (data or {}), "model": {}}
    config["answers"] = SETTINGS | answers
    folders = {"base": folder / "base", "start": folder / "start", "tokens": folder / "tokens"}
    return forked_stage(
        "sample_answers", *words, **folders, tokenizer=tokenizer, output=output, config=config
    )


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("answers") / "answers"
    done = sample(folder, output)
    assert done.returncode == 0, done.stderr
    return output


def ids_of(output: Path) -> list[list[int]]:
    return [answer.ids for prompt in read_answers(output) for answer in prompt.answers]


def test_log_probabilities_are_those_of_stock_packages_for_the_same_tokens(folder, finished):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", device_map="cpu")
    model = PeftModel.from_pretrained(base.dequantize(), folder / "start")
    sampled, stock = [], []
    for prompt in read_answers(finished):
        for answer in prompt.answers:
            ids = torch.tensor([*prompt.prompt, *answer.ids])[None]
            with torch.no_grad():
                log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
            places = torch.arange(len(prompt.prompt) - 1, ids.shape[1] - 1)
            stock.append(log_probs[places, ids[0, places + 1]])
            sampled.append(torch.tensor(answer.log_probs))
    assert lost(torch.cat(sampled), torch.cat(stock)) <= allowed([])


def test_prompts_are_the_rows_before_their_answers_with_the_rows_values(folder, finished):
    prompts = read_answers(finished)
    assert [prompt.split for prompt in prompts] == ["train"] * 20 + ["heldout"] * 4
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert all(prompt.values == rows[prompt.row - 1] for prompt in prompts[:20])
    assert all(prompt.values["prompt"] in prompt.text for prompt in prompts)


def test_rounds_take_other_training_prompts_and_the_same_heldout_ones(folder, finished, tmp_path):
    done = sample(folder, tmp_path / "answers", round=2)
    assert done.returncode == 0, done.stderr
    first, second = read_answers(finished), read_answers(tmp_path / "answers")
    rows = [{p.row for p in prompts if p.split == "train"} for prompts in (first, second)]
    assert rows[0] & rows[1] == set()
    assert [p.row for p in first[20:]] == [p.row for p in second[20:]]


@pytest.mark.parametrize("sharded", [False, True], ids=["a copy each", "shared weights"])
def test_two_processes_give_the_same_answers(folder, finished, tmp_path, sharded):
    words = ["--sharded"] if sharded else []
    done = sample(folder, tmp_path / "answers", *words, "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert ids_of(tmp_path / "answers") == ids_of(finished)


def test_answer_that_is_cut_has_the_longest_length_and_others_end_in_an_end(finished):
    for prompt in read_answers(finished):
        for answer in prompt.answers:
            assert len(answer.ids) == len(answer.log_probs) <= 7
            assert (answer.finish == "length") == (answer.ids[-1] != 2)


def test_rows_without_prompts_are_refused(folder, tmp_path):
    texts = save_rows(tmp_path / "texts.jsonl", [{"text": f"text {n}"} for n in range(30)])
    data = {"train": str(texts), "heldout": str(folder / "heldout.jsonl")}
    said = refusal_of(sample(folder, tmp_path / "out", data=data), output=tmp_path / "out")
    assert "its rows are texts, and answers are sampled to prompts" in said


def test_prompts_too_long_for_a_row_are_counted_and_none_left_is_an_error(folder, tmp_path):
    done = sample(folder, tmp_path / "out", max_new_tokens=60)
    said = refusal_of(done, output=tmp_path / "out")
    assert "has a prompt that can be answered (20: prompt leaves less room" in said


def test_rows_that_the_split_holds_out_are_heldout_prompts_and_never_trained(folder, tmp_path):
    stage = Stage(tmp_path, folder / "base-original")
    stage.heldout = None
    store = stage.run(heldout_share=0.2)
    heldout = {tuple(ids[mask.argmin() : mask.argmax()]) for ids, mask in store.heldout_documents()}
    for name in ("base", "base-original", "start"):
        (tmp_path / name).symlink_to(folder / name)
    data = {"train": str(stage.train), "heldout": None, "heldout_share": 0.2}
    done = sample(tmp_path, tmp_path / "answers", data=data, prompts_per_round=500)
    assert done.returncode == 0, done.stderr
    prompts = read_answers(tmp_path / "answers")
    trained = {tuple(prompt.prompt) for prompt in prompts if prompt.split == "train"}
    held = {tuple(prompt.prompt) for prompt in prompts if prompt.split == "heldout"}
    assert (len(trained), len(held)) == (53 - len(heldout), 4)
    assert held < heldout
    assert not trained & heldout
    assert f"{len(heldout)} rows of this round are left out: held out" in done.stderr

"""The stage on a tiny base with an adapter: its answers, their log-probabilities, and a restart."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.fake_vllm import LOG_P, fake_python
from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.rounding import allowed, lost
from tests.support.tiny import tiny_tokenizer
from tests.support.tiny_export import tiny_adapter, tiny_base
from tests.support.tokenizing import Stage, save_rows
from workflow.lib.artifacts.layout import SERVING
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
    folder: Path,
    output: Path,
    *words: str,
    data: dict[str, Any] | None = None,
    killed_at: str | None = None,
    python: str | None = None,
    **answers: Any,
):
    tokenizer = folder / "base-original"
    stage = Stage(folder, tokenizer)
    config = {"data": stage.config()["data"] | (data or {}), "model": {}}
    config["answers"] = SETTINGS | answers
    folders = {"start": folder / "start", "tokens": folder / "tokens", "tokenizer": tokenizer}
    if "sampler" in answers:
        folders |= {"model": folder / "base-original", "python": python or folder / "python"}
    else:
        folders["base"] = folder / "base"
    how = {"output": output, "config": config, "killed_at": killed_at}
    return forked_stage("sample_answers", *words, **folders, **how)


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
    check_log_probabilities(
        finished, PeftModel.from_pretrained(base.dequantize(), folder / "start")
    )


@pytest.mark.skipif(not Path(SERVING).exists(), reason="vLLM has no environment; make serving")
def test_vllm_samples_by_the_seeds_and_tells_the_probabilities_of_stock_packages(folder, tmp_path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # vLLM: at least
    config = LlamaConfig.from_pretrained(folder / "base-original", **heads)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base-original")
    tiny_tokenizer(tmp_path / "base-original")
    tiny_adapter(model, tmp_path / "start")
    for name in ("train.jsonl", "heldout.jsonl", "tokens"):
        (tmp_path / name).symlink_to(folder / name)
    outputs = [tmp_path / "answers", tmp_path / "again"]
    for output in outputs:
        done = sample(tmp_path, output, sampler="vllm", python=SERVING, stop=["a", "b"])
        assert done.returncode == 0, done.stderr
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base-original")
    check_log_probabilities(outputs[0], PeftModel.from_pretrained(base, tmp_path / "start"))
    answers = [answer for prompt in read_answers(outputs[0]) for answer in prompt.answers]
    assert len({tuple(answer.ids) for answer in answers}) > len(answers) / 2
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert ids_of(outputs[1]) == ids_of(outputs[0])


def check_log_probabilities(output, model):
    sampled, stock = [], []
    for prompt in read_answers(output):
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


@pytest.mark.parametrize("kind", ["texts", "all trained"])
def test_rows_without_prompts_are_refused(folder, tmp_path, kind):
    texts = save_rows(tmp_path / "texts.jsonl", [{"text": f"text {n}"} for n in range(30)])
    data = {"train": str(texts), "heldout": str(folder / "heldout.jsonl")}
    if kind == "all trained":
        data = {"loss_on": "all"}
    said = refusal_of(sample(folder, tmp_path / "out", data=data), output=tmp_path / "out")
    assert "no row of data.train has a prompt that can be answered (20: no prompt bef" in said


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
    assert f"{len(heldout)} rows of this round are left out: of the heldout split" in done.stderr


SHARDS = {"per_prompt": 64, "max_new_tokens": 3}  # three shards, of 512 answers at most


def test_stage_killed_in_the_middle_continues_and_gives_the_same_answers(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert sample(folder, whole, **SHARDS).returncode == 0
    killed = sample(folder, cut, killed_at="answers-00001.jsonl", **SHARDS)
    assert killed.returncode == -signal.SIGKILL
    partial = cut.with_name(".cut.partial")
    (finished,) = partial.glob("*.jsonl")
    before = finished.stat().st_ino
    done = sample(folder, cut, **SHARDS)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 shards to sample" in done.stderr
    assert (cut / finished.name).stat().st_ino == before
    assert ids_of(cut) == ids_of(whole)


@pytest.fixture
def fake(folder, tmp_path, monkeypatch):
    """vLLM's stand-in."""
    fake_python(folder)
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))


def test_server_samples_each_answer_by_its_own_seed(fake, folder, tmp_path):
    done = sample(folder, tmp_path / "answers", sampler="vllm")
    assert done.returncode == 0, done.stderr
    assert "vLLM 9.9 samples in float32" in done.stderr
    prompts = read_answers(tmp_path / "answers")
    answers = [answer for prompt in prompts for answer in prompt.answers]
    assert len({tuple(answer.ids) for answer in answers}) > len(answers) / 2
    for answer in answers:
        assert answer.log_probs == [LOG_P * id for id in answer.ids]
        assert (answer.finish == "length") == (answer.ids[-1] != 2)
        assert len(answer.ids) <= 7


def test_server_that_dies_within_a_round_is_one_message_and_nothing_is_lost(
    fake, folder, tmp_path, monkeypatch
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert sample(folder, whole, sampler="vllm", **SHARDS).returncode == 0
    monkeypatch.setenv("FAKE_VLLM", "dies")
    monkeypatch.setenv("FAKE_VLLM_ANSWERS", "600")
    said = refusal_of(sample(folder, cut, sampler="vllm", **SHARDS), output=cut)
    assert "answers.sampler: vLLM ended while it was asked /v1/completions: it was killed" in said
    assert "torch.OutOfMemoryError: no room" in said
    monkeypatch.delenv("FAKE_VLLM")
    done = sample(folder, cut, sampler="vllm", **SHARDS)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 shards to sample" in done.stderr
    assert ids_of(cut) == ids_of(whole)

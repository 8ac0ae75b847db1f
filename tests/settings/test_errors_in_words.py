"""Messages about wrong settings: one line each, that a person can act on."""

import datetime

import pytest

from tests.support.settings_examples import message
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError, as_yaml


@pytest.mark.parametrize(
    ("document", "key", "answer"),
    [
        ({"train": {"learing_rate": 1}}, "train.learing_rate", "Did you mean 'learning_rate'?"),
        ({"data": {"columns": {"promt": "q"}}}, "data.columns.promt", "Did you mean 'prompt'?"),
        (
            {"data": {"train": ["a", {"path": "b", "wieght": 2}]}},
            "data.train.2.wieght",
            "Did you mean 'weight'?",
        ),
        ({"learning_rate": 1}, "learning_rate", "Did you mean 'train.learning_rate'?"),
        ({"max_step": 1}, "max_step", "Did you mean 'train.max_steps'?"),
        ({"train": {"lr": 1}}, "train.lr", "Did you mean 'learning_rate'?"),
        ({"train.seed": 1}, "train.seed", "Write it in two levels: train: {seed: ...}."),
        ({"train": {"batch_size": 1}}, "train.batch_size", "Did you mean 'global_batch_size'?"),
        ({"lora": {"rank": 8}}, "lora.rank", "Did you mean 'lora.r'?"),
        ({"lora_r": 8}, "lora_r", "Did you mean 'lora.r'?"),
        ({"data": {"cutoff_len": 512}}, "data.cutoff_len", "Did you mean 'data.seq_len'?"),
        (
            {"train": {"save_steps": 100}},
            "train.save_steps",
            "It is a key of other trainers: checkpoints come every 50 steps and 20 minutes "
            "(train.checkpoint_every_steps).",
        ),
        (
            {"quantize": {"zzz": 1}},
            "quantize.zzz",
            "Valid keys: block_size, double_quant, method, keep, "
            "calibration_tokens, calibration_text.",
        ),
    ],
)
def test_unknown_key_is_answered_with_the_nearest_one_or_all(document, key, answer):
    assert message(document) == [f"{key}: there is no such key. {answer}"]


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("train", "learning_rate", 0, "must be above 0.0"),
        ("train", "learning_rate", 1.5, "must be at most 1.0"),
        ("train", "learning_rate", float("nan"), "must be finite"),
        ("train", "warmup_share", -0.1, "must be at least 0.0"),
        ("train", "adam_beta1", 1.0, "must be below 1.0"),
        ("train", "seed", 0.5, "must be a whole number"),
        (
            "train",
            "lr_schedule",
            "step",
            "must be 'cosine', 'linear', 'constant', 'cosine_with_restarts' or "
            "'warmup_stable_decay'",
        ),
        ("train", "micro_batch_size", "x", "must be a whole number or 'auto'"),
        ("train", "activation_checkpointing", "maybe", "must be true, false, auto or a number"),
        ("evaluate", "shard", "maybe", "must be true, false or auto"),
        ("train", "activation_checkpointing", [2], "must be true or false or a number or 'auto'"),
        ("hardware", "gpus", "two", "must be a whole number or 'auto'"),
        ("hardware", "host_memory_gib", [], "must be a number or 'auto'"),
        ("hardware", "offload_embedding", "yes", "must be true, false or auto"),
        ("model", "source", "a" * 1025, "must have at most 1024 characters"),
        ("quantize", "block_size", 65, "must be 64, 128, 256 or 512"),
        ("data", "columns", 7, "must be a section (keys below it)"),
        ("model", "source", None, "must be text"),
        ("train", "micro_batch_size", 0, "must be at least 1 or 'auto'"),
        ("export", "hub_repo", "mine", "must be a hub id of the form owner/name"),
        (
            "model",
            "name",
            "é",
            "may have letters, digits, '.', '_' and '-', up to 64, a letter or digit first",
        ),
        ("export", "steps", ["a", "b"], "entry 1 must be a whole number"),
        ("export", "steps", True, "must be a list"),
        ("evaluate", "require", True, "must be a section (keys below it)"),
        ("export", "steps", [2, 0], "entry 2 must be at least 1"),
        ("data", "train", [], "must have at least 1 entry"),
        ("data", "heldout", [], "must have at least 1 entry"),
        ("export", "steps", [5, 3, 5], "entry 3 stands there twice"),
        ("export", "gguf", ["q8_0", "q8_0"], "entry 2 stands there twice"),
        ("evaluate", "tasks", ["a", ""], "entry 2 must not be empty"),
        ("evaluate", "tasks_dir", "", "must not be empty"),
        ("hardware", "gpus", 5000, "must be at most 4096 or 'auto'"),
        ("hardware", "gpu_memory_gib", 0, "must be above 0.0 or 'auto'"),
        ("hardware", "host_memory_gib", 1e300, "must be at most 1000000.0 or 'auto'"),
        ("hardware", "offload_activations", -1, "must be true or false or at least 0 or 'auto'"),
        ("evaluate", "processes", 65, "must be at most 64 or 'auto'"),
        ("data", "train", [["a"]], "entry 1 must be text"),
        ("data", "train", {"weight": 2}, "path must be given"),
        (
            "data",
            "heldout",
            ["a", {"path": "a", "format": "x"}],
            "format of entry 2 must be 'auto', 'messages', 'prompt_completion', 'alpaca', "
            "'tokens', 'text', 'pairs' or 'ranked'",
        ),
    ],
)
def test_wrong_value_gives_one_line_with_setting_value_bound_and_change(section, key, value, bound):
    assert message({section: {key: value}}) == [
        f"{section}.{key} = {as_yaml(value)}: {bound}. Change it."
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "shown", "bound"),
    [
        ("model", "name", 7, "7", "must be text"),
        ("model", "name", datetime.date(2026, 1, 1), "2026-01-01", "must be text"),
        ("data", "train", True, "true", "must be text"),
        ("lora", "target_modules", 3, "3", "must be a list or text"),
        ("lora", "target_modules", ["q", 3], "['q', 3]", "entry 2 must be text"),
        ("data", "train", ["a", 7], "['a', 7]", "entry 2 must be text"),
        (
            "data",
            "train",
            {"path": "a", "columns": {"text": 1}},
            "{'path': 'a', 'columns': {'text': 1}}",
            "columns.text must be text",
        ),
    ],
)
def test_text_that_yaml_takes_for_something_else_is_to_be_quoted(section, key, value, shown, bound):
    (line,) = message({section: {key: value}})
    assert line.startswith(f"{section}.{key} = {shown}: {bound}. Put it in quotes")


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("train", "micro_batch_size", 17, "must be at most global_batch_size = 16"),
        ("train", "activation_checkpointing", 1.5, "a share of the layers must be above 0 and"),
        ("train", "activation_checkpointing", 0, "a number of layers must be at least 1"),
        ("train", "early_stopping_patience", 3, "= 3: it counts held-out losses, and evaluate_ev"),
        ("train", "lr_cycles", 3, "lr_cycles = 3: lr_schedule = cosine does not read it"),
        ("train", "decay_share", 0.2, "decay_share = 0.2: lr_schedule = cosine does not read it"),
        ("lora", "target_modules", [], "target_modules = []: name at least one linear layer"),
        ("data", "revision", "v1", "revision is set but source is null"),
        ("data", "heldout", {"path": "a", "weight": 2}, "heldout gives 'a' a weight"),
    ],
)
def test_value_that_does_not_fit_its_section_names_section_and_bound(section, key, value, bound):
    (line,) = message({section: {key: value}})
    assert line.startswith(f"{section}: ")
    assert bound in line


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [
        (["<a> "], "'<a> ' has blanks around it"),
        (["<a\u200b>"], "'<a\\u200b>' has blanks around it, or characters without a glyph"),
    ],
)
def test_token_that_cannot_be_added_is_named(tokens, bound):
    (line,) = message({"model": {"add_tokens": tokens}})
    assert line.startswith(f"model.add_tokens: {bound}")


def test_all_mistakes_are_reported_at_once():
    assert len(message({"train": {"seed": -1, "typo": 1}, "lora": {"r": 0}})) == 3


@pytest.mark.parametrize(
    ("length", "change"),
    [
        ({"epochs": None}, "Set one of them"),
        ({"epochs": 1.0, "max_steps": 7}, "Set the other to null"),
    ],
)
def test_exactly_one_of_epochs_and_max_steps_is_demanded(length, change):
    (line,) = message({"train": length})
    assert f"exactly one sets the length. {change}." in line


def test_key_that_yaml_reads_as_a_number_is_refused():
    assert message({"train": {7: 1}}) == ["train.7: a key must be text. Change it."]


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ({}, "runs = {}: must have at least 1 entry. Change it."),
        (None, "runs = null: must be a section (keys below it). Change it."),
        ({"a": 3}, "runs.a = 3: must be a section (keys below it). Change it."),
        ({"a": {"lora": {"r": 0}}}, "runs.a.lora.r = 0: must be at least 1. Change it."),
        (
            {"a": {"runs": {}}},
            "runs.a.runs: there is no such key. Valid keys: model, data, quantize, lora, train, "
            "preferences, distill, grpo, answers, rewards, hardware, tracking, export, evaluate.",
        ),
        (
            {"a": {"report": {"title": "x"}}},
            "runs.a.report: it holds for all runs. Write it above `runs:`.",
        ),
        (
            {"a": {"train": {"max_steps": 5, "epochs": 3}}},
            "runs.a.train: epochs = 3.0 and max_steps = 5: exactly one sets the length. "
            "Set the other to null.",
        ),
    ],
)
def test_mistake_in_a_run_is_named_by_the_path_in_the_file(runs, line):
    assert message({"runs": runs}) == [line]


@pytest.mark.parametrize(
    ("name", "shown"),
    [(False, "false"), (True, "true"), (1.5, "1.5"), (datetime.date(2026, 1, 1), "2026-01-01")],
)
def test_name_of_a_run_that_yaml_takes_for_something_else_is_to_be_quoted(name, shown):
    with pytest.raises(UserError, match=rf"runs: the name {shown} must be text\. Put it in quotes"):
        load_config({"runs": {name: {}}})


def test_runs_that_a_file_system_may_take_for_one_are_refused():
    with pytest.raises(UserError, match="runs: 'wide' and 'Wide' differ in case alone"):
        load_config({"runs": {"wide": {}, "other": {}, "Wide": {}}})


@pytest.mark.parametrize(
    ("setting", "value", "better"),
    [
        ("train.optimizer", "paged_adamw_8bit", "adamw_8bit"),
        ("train.lr_schedule", "constant_with_warmup", "constant"),
        ("data.overlong", "keep_start", "truncate"),
    ],
)
def test_value_of_another_trainer_is_answered_with_one_of_ours(setting, value, better):
    section, key = setting.split(".")
    assert message({section: {key: value}}) == [
        f"{setting} = {value!r}: it is a value of other trainers. Set it to {better}."
    ]
    load_config({section: {key: better}})

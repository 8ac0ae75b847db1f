"""Published and own configs of other trainers: what becomes of them, and of each key."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from workflow.importing.reading import Source, read_source
from workflow.importing.rules import translate
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.system.errors import UserError
from workflow.scripts.import_config import account, by_reason, checked

HERE = Path(__file__).parent
QLORA = {"base_model": "owner/model", "adapter": "qlora", "load_in_4bit": True}
QLORA |= {"datasets": [{"path": "data/rows.jsonl", "type": "alpaca"}]}


def examples():
    """Yield the examples of the trainers' own repositories, by their keys and values."""
    for trainer in ("axolotl", "llama_factory"):
        file = HERE / f"{trainer}_examples.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines():
            example = json.loads(line)
            yield trainer, example["name"], example["keys"]


def imported(keys, *, trainer="axolotl", gpus=1):
    return translate(Source(Path("config.yml"), trainer, keys), gpus=gpus)


def run_of(draft) -> RunConfig:
    (run,) = load_config(checked(draft))[1].values()
    return run


# How many of the 30 examples become a config, and why the others do not: the first reason.
ENDS = {
    ("axolotl", "a config"): 20,
    ("axolotl", "other weights"): 1,
    ("axolotl", "all weights"): 6,
    ("axolotl", "pictures"): 1,
    ("axolotl", "an adapter is not merged"): 1,
    ("axolotl", "trained are"): 1,
    ("llama_factory", "a config"): 14,
    ("llama_factory", "all weights"): 8,
    ("llama_factory", "the file merges"): 3,
    ("llama_factory", "LoRA's adapters alone"): 2,
    ("llama_factory", "trained are"): 1,
    ("llama_factory", "pictures"): 1,
    ("llama_factory", "it is a file of LLaMA-Factory's v1"): 1,
}


def test_each_example_becomes_a_config_or_one_message_that_says_why_not(tmp_path):
    ends = Counter()
    for trainer, name, keys in examples():
        file = tmp_path / "example.yaml"
        file.write_text(yaml.safe_dump(keys), encoding="utf-8")
        source = read_source(file, None)
        assert source.trainer == trainer, name
        try:
            load_config(checked(translate(source, gpus=2)))
            message = ": a config"
        except UserError as error:
            message = str(error)
        reasons = [why for of, why in ENDS if of == trainer and f": {why}" in message]
        ends[trainer, reasons[0] if reasons else message] += 1
    assert ends == ENDS


def test_each_key_of_each_example_is_known_and_told_of_once():
    for trainer, name, keys in examples():
        draft = imported(keys, trainer=trainer)
        told_of = [key for o in draft.outcomes for keys in o.keys for key in keys.split(", ")]
        counted = Counter(key.split(" ")[0].split(".")[0] for key in told_of)
        if not by_reason(draft, "refused"):
            assert by_reason(draft, "unknown") == {}, name
        assert counted.keys() >= keys.keys(), (name, keys.keys() - counted.keys())


def test_batch_is_rows_times_accumulation_times_gpus():
    keys = QLORA | {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    draft = imported(keys, gpus=3)
    assert run_of(draft).train.global_batch_size == 24
    assert "= 24: 2 x 4 of accumulation x 3 GPUs" in account(draft)


RESTARTS = {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}
STABLE = {
    "max_steps": 200,
    "lr_scheduler": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 50, "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize(
    ("keys", "setting", "value"),
    [
        ({"sequence_len": 4096}, "data.seq_len", 4096),
        ({}, "data.seq_len", 512),  # axolotl's default is not ours
        ({}, "train.epochs", 1.0),
        ({"lora_target_linear": True}, "lora.target_modules", "all-linear"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "lora.target_modules", ("q_proj",)),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "lora.modules_to_save", ("lm_head",)),
        ({"tokens": ["<a>", "<b>"]}, "model.add_tokens", ("<a>", "<b>")),
        (
            {"lora_target_modules": r"model\.(q|k)_proj"},
            "lora.target_modules",
            r"model\.(q|k)_proj",
        ),
        ({"warmup_steps": 10}, "train.warmup_steps", 10),
        ({"max_steps": 200, "warmup_steps": 10}, "train.warmup_steps", 10),
        ({"warmup_steps": 0.1}, "train.warmup_share", 0.1),
        ({}, "data.overlong", "drop"),  # axolotl's default
        ({"max_steps": 90, "eval_steps": 0.1}, "train.evaluate_every_steps", 9),
        ({"max_steps": 90, "save_steps": 0.5}, "train.checkpoint_every_steps", 45),
        ({"max_steps": 200, "num_epochs": 4}, "train.epochs", None),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, "train.warmup_share", 0.0),
        ({"lr_scheduler": "polynomial"}, "train.lr_schedule", "cosine"),
        (RESTARTS, "train.lr_cycles", 3),
        (STABLE, "train.decay_share", 0.25),
        (STABLE, "train.min_lr_share", 0.1),
        ({"use_wandb": True, "wandb_project": "a"}, "tracking.wandb_project", "a"),
        ({"use_mlflow": True, "mlflow_experiment_name": "a"}, "tracking.mlflow_experiment", "a"),
        ({"report_to": ["mlflow", "trackio"]}, "tracking.trackio_project", "huggingface"),
        ({"use_trackio": True, "trackio_project_name": "a"}, "tracking.trackio_project", "a"),
        ({"loraplus_lr_ratio": 16}, "train.loraplus_lr_ratio", 16.0),
        ({"optimizer": "paged_adamw_8bit"}, "train.optimizer", "adamw_8bit"),
        ({"optimizer": "lion_8bit"}, "train.optimizer", "adamw"),
        ({"learning_rate": "1e-5"}, "train.learning_rate", 1e-5),
        ({"max_grad_norm": 0}, "train.max_grad_norm", None),
        ({"train_on_inputs": True}, "data.loss_on", "all"),
        ({"val_set_size": 0.1}, "data.heldout_share", 0.1),
        ({"fp16": True}, "model.compute_dtype", "float16"),
        ({"eval_steps": 20}, "train.evaluate_every_steps", 20),
        ({"eval_steps": 20, "early_stopping_patience": 3}, "train.early_stopping_patience", 3),
        ({"early_stopping_patience": 3}, "train.early_stopping_patience", None),
        ({"rl": "orpo", "orpo_alpha": 0.3}, "preferences.beta", 0.3),
        ({"rl": "dpo", "dpo_loss_type": ["ipo"]}, "train.objective", "ipo"),
        ({"rl": "dpo", "dpo_loss_type": ["hinge"]}, "preferences.loss_type", "hinge"),
        ({"rl": "kto", "kto_desirable_weight": 0.2}, "preferences.desirable_weight", 0.2),
        ({"lora_model_dir": "out/adapter"}, "train.start_from", "out/adapter"),
    ],
)
def test_a_key_means_this_setting(keys, setting, value):
    section, name = setting.split(".")
    assert getattr(getattr(run_of(imported(QLORA | keys)), section), name) == value


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"adapter": None}, "adapter is not given: all weights would be trained"),
        ({"adapter": "llama-adapter"}, "LoRA's adapters alone are trained"),
        ({"rl": "grpo"}, "rl = 'grpo': trained are sft, dpo"),
        ({"learning_rate": "fast"}, r"learning_rate \(train.learning_rate\) = 'fast': must be a"),
        ({"lora_r": 0}, r"lora_r \(lora.r\) = 0: must be at least 1"),
        ({"micro_batch_size": "two"}, "micro_batch_size = 'two': must be a number"),
        ({"lora_target_modules": [1]}, "must be a text, or a list of texts"),
        ({"datasets": [3]}, "must be a list of datasets"),
        ({"eval_steps": 0.1}, "eval_steps = 0.1: a share of all steps"),
        (STABLE | {"max_steps": None}, "num_decay_steps = 50: .* max_steps"),
        ({"unfrozen_parameters": ["lm_head"]}, "other weights than those of an adapter"),
        ({"adam_eps": 1e-8, "adam_epsilon": 1e-9}, "adam_eps means the same"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_own_name(keys, words):
    with pytest.raises(UserError, match=words):
        checked(imported(QLORA | keys))


def test_an_unknown_key_is_named_with_the_nearest_known_one():
    draft = imported(QLORA | {"lora_rnak": 3})
    (why,) = by_reason(draft, "unknown")
    assert why.endswith("did you mean lora_r?")


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [("roles_to_train", ["assistant"], ["user", "assistant"]), ("train_on_eos", "turn", "all")],
)
def test_value_that_trains_other_tokens_has_no_counterpart(key, usual, other):
    for value, kind in ((usual, "not needed"), (other, "without counterpart")):
        draft = imported(QLORA | {"datasets": [{"path": "rows.jsonl", key: value}]})
        assert [f"datasets.{key}"] in [
            [*outcome.keys] for outcome in draft.outcomes if outcome.kind == kind
        ]


def test_base_in_8_bits_is_told_of_as_changed():
    changed = by_reason(imported(QLORA | {"load_in_4bit": False, "load_in_8bit": True}), "changed")
    assert any("not in 8" in why for why in changed)


@pytest.mark.parametrize(
    ("keys", "trainer"),
    [
        (QLORA | {"adapter": "lora", "load_in_4bit": False}, "axolotl"),
        ({"model_name_or_path": "owner/model", "stage": "sft", "dataset": "rows"}, "llama_factory"),
    ],
)
def test_lora_on_16_bits_stays_on_16_bits(keys, trainer):
    assert run_of(imported(keys, trainer=trainer)).quantize.method == "none"


def test_alpha_is_twice_the_rank_where_llama_factory_is_told_none():
    keys = {"model_name_or_path": "owner/model", "stage": "sft", "lora_rank": 12, "dataset": "rows"}
    assert run_of(imported(keys, trainer="llama_factory")).lora.alpha == 24


@pytest.mark.parametrize(
    ("keys", "objective"),
    [
        ({}, "sft"),
        ({"beta": 0.2}, "dpo"),
        ({"loss_type": "simpo", "simpo_gamma": 1.0}, "simpo"),
        ({"undesirable_weight": 2.0}, "kto"),
    ],
)
def test_keys_of_trl_tell_what_is_trained(keys, objective):
    keys |= {"model_name_or_path": "owner/model", "dataset_name": "owner/rows", "use_peft": True}
    assert run_of(imported(keys, trainer="trl")).train.objective == objective

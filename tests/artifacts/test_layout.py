"""Folders, keys and what each stage reads: what must and must not make a stage run again."""

import json
from pathlib import Path
from typing import Any

import pytest

from workflow.lib.artifacts.layout import (
    STAGE_SECTIONS,
    UNRECORDED_SECTIONS,
    base_dir,
    base_key,
    calibration_hash,
    calibration_text,
    calibration_tokens,
    checkpoint_dir,
    data_files,
    dataset_dir,
    dataset_key,
    fingerprint,
    model_dir,
    model_key,
    recorded_json,
    report_json,
    stage_dir,
    stage_json,
    stage_settings,
    token_arrays,
    tokens_dir,
    tokens_key,
)
from workflow.lib.settings.config import HardwareConfig, RunConfig, TrainConfig, load_config, merge

KEYS = {
    "model": model_key,
    "dataset": dataset_key,
    "tokens": tokens_key,
    "base": base_key,
    "fingerprint": fingerprint,
}
HUB_DATA = {"source": "owner/data", "train": "train.jsonl", "heldout": None}


def run_with(section: str | None = None, **changes: Any) -> RunConfig:
    """Return a run of a hub model and a hub dataset, with one section changed."""
    document: dict[str, Any] = {"model": {"source": "owner/name"}, "data": HUB_DATA}
    (run,) = load_config(merge(document, {section: changes} if section else {}))[1].values()
    return run


def test_run_without_trained_modules_is_the_run_that_it_was_before_there_were_such() -> None:
    assert "modules_to_save" not in stage_json("finetune", run_with())
    chosen = run_with("lora", modules_to_save=["lm_head"])
    assert '"modules_to_save":["lm_head"]' in stage_json("finetune", chosen)


def test_equal_settings_give_equal_keys() -> None:
    assert {n: key(run_with()) for n, key in KEYS.items()} == {
        n: key(run_with()) for n, key in KEYS.items()
    }


@pytest.mark.parametrize(
    ("section", "change", "changed"),
    [
        ("model", {"source": "owner/other"}, {"model", "tokens", "base", "fingerprint"}),
        ("model", {"revision": "v2"}, {"model", "tokens", "base", "fingerprint"}),
        ("model", {"compute_dtype": "float32"}, {"fingerprint"}),
        ("model", {"attention": "eager"}, set()),
        ("model", {"name": "label"}, set()),
        ("data", {"source": "owner/other"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"revision": "v2"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"train": "other.jsonl"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"heldout": "test.jsonl"}, {"dataset", "tokens", "fingerprint"}),
        (
            "data",
            {"train": {"path": "train.jsonl", "weight": 2.0}},
            {"tokens", "fingerprint"},
        ),
        ("data", {"seq_len": 131}, {"tokens", "fingerprint"}),
        ("data", {"max_rejected_share": 0.5}, set()),
        ("data", {"columns": {"prompt": "question"}}, {"tokens", "fingerprint"}),
        ("quantize", {"block_size": 128}, {"base", "fingerprint"}),
        ("quantize", {"double_quant": False}, {"base", "fingerprint"}),
        ("lora", {"r": 3}, {"fingerprint"}),
        ("lora", {"modules_to_save": ["lm_head"]}, {"fingerprint"}),
        ("lora", {"modules_to_save": []}, set()),
        ("lora", {"target_modules": ["q_proj"]}, {"fingerprint"}),
        ("train", {"router_aux_loss_coef": None}, set()),
        ("hardware", {"gpus": 0, "cpu_processes": 3}, set()),
        ("hardware", {"offload_layers": 2}, set()),
        ("tracking", {"wandb_project": "mine"}, set()),
        ("export", {"merged": True}, set()),
        ("evaluate", {"samples": 3}, set()),
    ],
)
def test_setting_changes_exactly_the_keys_of_what_depends_on_it(
    section: str, change: dict[str, Any], changed: set[str]
) -> None:
    before, after = run_with(), run_with(section, **change)
    assert {name for name, key in KEYS.items() if key(before) != key(after)} == changed


def test_measurements_that_times_are_fitted_to_count_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    run = run_with("hardware", calibration=str(path))
    hashes = set()
    for text in ("one", "two"):
        path.write_text(text)
        hashes.add(calibration_hash(run))
    assert len(hashes) == 2
    assert calibration_hash(run_with()) is None


# One other value for every setting of `train`; a new setting must be added here, and so thought
# about.
OTHER_TRAIN_VALUES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 7},
    "epochs": {"epochs": 2.5},
    "max_steps": {"epochs": None, "max_steps": 11},
    "global_batch_size": {"global_batch_size": 13},
    "micro_batch_size": {"micro_batch_size": 2},
    "optimizer": {"optimizer": "adamw_8bit"},
    "learning_rate": {"learning_rate": 1e-3},
    "lr_schedule": {"lr_schedule": "linear"},
    "warmup_share": {"warmup_share": 0.1},
    "min_lr_share": {"min_lr_share": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "router_aux_loss_coef": {"router_aux_loss_coef": 0.1},
    "adam_beta1": {"adam_beta1": 0.8},
    "adam_beta2": {"adam_beta2": 0.9},
    "adam_eps": {"adam_eps": 1e-7},
    "max_grad_norm": {"max_grad_norm": None},
    "activation_checkpointing": {"activation_checkpointing": False},
    "fused_layers": {"fused_layers": False},
    "evaluate_every_steps": {"evaluate_every_steps": 3},
    "evaluate_documents": {"evaluate_documents": 3},
    "select": {"evaluate_every_steps": 3, "select": "best"},
    "checkpoint_every_steps": {"checkpoint_every_steps": 3},
    "checkpoint_every_minutes": {"checkpoint_every_minutes": None},
    "keep_checkpoints": {"keep_checkpoints": 1},
    "grace_seconds": {"grace_seconds": 5.0},
    "hang_seconds": {"hang_seconds": 7.0},
    "deterministic": {"deterministic": True},
    "log_every_steps": {"log_every_steps": 5},
    "fused_loss": {"fused_loss": False},
    "saved_activations": {"saved_activations": "float8"},
    "products": {"products": "int8"},
    "products_in": {"products_in": "backward"},
    "max_products_loss_rise": {"max_products_loss_rise": 0.1},
}
# What has a meaning beside another setting alone.
BESIDE: dict[str, dict[str, Any]] = {
    "products_in": {"products": "float8"},
    "max_products_loss_rise": {"products": "float8"},
}


# Settings that cannot change the trained adapter; stated here again, not taken from the code under
# test.
OPERATIONAL = {
    "micro_batch_size",
    "activation_checkpointing",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_checkpoints",
    "grace_seconds",
    "hang_seconds",
    "log_every_steps",
    "max_products_loss_rise",
}


@pytest.mark.parametrize("key", list(TrainConfig.model_fields))
def test_fingerprint_reacts_to_every_train_setting_but_the_operational_ones(key: str) -> None:
    beside = BESIDE.get(key, {})
    plain, other = (
        run_with("train", **beside),
        run_with("train", **beside, **OTHER_TRAIN_VALUES[key]),
    )
    changed = fingerprint(plain) != fingerprint(other)
    assert changed is (key not in OPERATIONAL)


@pytest.mark.parametrize(
    ("section", "change", "stages"),
    [
        (
            "model",
            {"compute_dtype": "float32"},
            {"preflight_run", "finetune", "consolidate", "evaluate_run", "write_card"},
        ),
        ("data", {"seq_len": 131}, {"tokenize_dataset", "preflight_run", "write_card"}),
        ("quantize", {"block_size": 128}, {"quantize_base", "preflight_run", "write_card"}),
        ("lora", {"r": 3}, {"preflight_run", "finetune"}),
        ("train", {"seed": 3}, {"preflight_run", "finetune"}),
        ("hardware", {"gpus": 0}, {"preflight_run"}),
        (
            "export",
            {"merged": True},
            {"preflight_run", "consolidate", "convert_gguf", "publish_run"},
        ),
        ("export", {"gguf": ("q8_0",), "gguf_of": ("adapter",)}, {"convert_gguf", "publish_run"}),
        ("tracking", {"tensorboard": False, "wandb_project": "mine"}, set()),
        ("evaluate", {"samples": 3}, {"preflight_run", "evaluate_run"}),
        ("evaluate", {"seed": 3}, {"evaluate_run"}),
        ("evaluate", {"tasks": []}, {"preflight_run", "evaluate_run"}),
        (
            "evaluate",
            {"batch_size": 3, "processes": 2, "shard": False},
            {"preflight_run", "evaluate_run"},
        ),
    ],
)
def test_editing_a_section_changes_only_the_stages_that_read_it(
    section: str, change: dict[str, Any], stages: set[str]
) -> None:
    before, after = run_with(), run_with(section, **change)
    assert {s for s in STAGE_SECTIONS if stage_json(s, before) != stage_json(s, after)} == stages


@pytest.mark.parametrize(
    ("section", "change", "stages"),
    [
        ("data", {"max_rejected_share": 0.5}, set()),
        ("train", {"log_every_steps": 7, "grace_seconds": 5.0}, set()),
        ("train", {"micro_batch_size": 1}, {"preflight_run"}),
        ("evaluate", {"batch_size": 3, "processes": 2, "shard": False}, set()),
        ("evaluate", {"samples": 3, "max_documents": 7}, {"evaluate_run"}),
        ("export", {"merged": True}, {"consolidate", "convert_gguf", "publish_run"}),
        ("train", {"learning_rate": 1e-3}, {"preflight_run", "finetune"}),
    ],
)
def test_setting_that_changes_no_result_reaches_its_stage_and_runs_none_again(
    section: str, change: dict[str, Any], stages: set[str]
) -> None:
    before, after = run_with(), run_with(section, **change)
    changed = {s for s in STAGE_SECTIONS if recorded_json(s, before) != recorded_json(s, after)}
    assert changed == stages
    assert any(stage_json(s, before) != stage_json(s, after) for s in STAGE_SECTIONS)


def test_what_is_recorded_of_defaults_is_what_stages_receive() -> None:
    """So that results from before a key was recorded as its default stay up to date."""
    for stage in STAGE_SECTIONS:
        assert recorded_json(stage, run_with()) == stage_json(stage, run_with())


def test_editing_the_report_changes_no_stage_of_a_run() -> None:
    plain, titled = (load_config({"report": r})[1]["demo"] for r in ({}, {"title": "Other"}))
    assert [stage_json(s, plain) for s in STAGE_SECTIONS] == [
        stage_json(s, titled) for s in STAGE_SECTIONS
    ]


def test_every_section_of_a_run_is_read_by_some_stage() -> None:
    read = [*STAGE_SECTIONS.values(), *UNRECORDED_SECTIONS.values()]
    assert set().union(*read) == set(RunConfig.model_fields)


@pytest.mark.parametrize("stage", list(STAGE_SECTIONS))
def test_stage_json_does_not_depend_on_the_order_of_keys(stage: str) -> None:
    def reordered(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: reordered(value[key]) for key in reversed(value)}

    document = run_with("train", seed=3).model_dump(mode="json")
    assert list(reordered(document)) != list(document)
    assert stage_json(stage, RunConfig.model_validate(reordered(document))) == stage_json(
        stage, RunConfig.model_validate(document)
    )


@pytest.mark.parametrize("stage", list(STAGE_SECTIONS))
def test_stage_json_loads_back_to_the_sections_of_the_stage(stage: str) -> None:
    run = run_with()
    settings = json.loads(stage_json(stage, run))
    assert settings == stage_settings(stage, run)
    assert {
        name: type(getattr(run, name)).model_validate(value) for name, value in settings.items()
    } == {name: getattr(run, name) for name in STAGE_SECTIONS[stage]}


def test_stage_json_is_one_line_without_characters_that_yaml_would_wrap() -> None:
    assert not set("\n\r\t ") & set(stage_json("finetune", run_with()))


def test_base_depends_on_tokens_only_if_they_calibrate() -> None:
    plain, other_rows = run_with("data", seq_len=61), run_with("data", seq_len=67)
    assert base_dir(plain) == base_dir(other_rows)
    assert calibration_tokens(plain) == []
    calibrated = [
        RunConfig.model_validate({"data": {"seq_len": n}, "quantize": {"method": "calibrated"}})
        for n in (61, 67)
    ]
    assert len({base_dir(run) for run in (plain, *calibrated)}) == 3
    files = [f"{tokens_dir(calibrated[0])}/manifest.json", *token_arrays(calibrated[0])]
    assert calibration_tokens(calibrated[0]) == files


def test_base_waits_for_tokens_where_the_model_decides_whether_they_calibrate() -> None:
    """What a hub model is like is not known while the workflow is parsed."""
    chosen, other_rows = (
        RunConfig.model_validate({"data": {"seq_len": n}, "quantize": {"method": "auto"}})
        for n in (61, 67)
    )
    assert calibration_tokens(chosen)[0] == f"{tokens_dir(chosen)}/manifest.json"
    assert base_dir(chosen) != base_dir(other_rows)
    on_gpus = chosen.model_copy(update={"hardware": HardwareConfig(gpus=2)})
    assert base_dir(chosen) == base_dir(on_gpus)


def test_settings_of_a_calibration_change_no_base_without_one() -> None:
    plain, other = run_with("quantize"), run_with("quantize", calibration_tokens=4096)
    assert base_key(plain) == base_key(other)


def test_text_that_calibrates_is_an_input() -> None:
    for method, text in (("calibrated", "mine.txt"), ("absmax", None)):
        settings = {"method": method, "calibration_text": "mine.txt"}
        assert calibration_text(RunConfig.model_validate({"quantize": settings})) == text


def test_runs_with_equal_data_and_base_share_tokens_and_base() -> None:
    one, other = run_with("lora", r=3), run_with("train", seed=5)
    assert tokens_dir(one) == tokens_dir(other)
    assert base_dir(one) == base_dir(other)
    assert checkpoint_dir("same", one) != checkpoint_dir("same", other)


def test_hub_sources_get_folders_with_label_and_key() -> None:
    run = run_with()
    assert model_dir(run) == f"results/hub/model/pydocs-base-{model_key(run)}"
    assert dataset_dir(run) == f"results/hub/dataset/pydocs-{dataset_key(run)}"
    assert data_files(run) == [dataset_dir(run)]


def test_local_sources_stay_where_they_are(tmp_path: Path) -> None:
    files = [f"{tmp_path}/b.jsonl", f"{tmp_path}/a.csv"]
    for file in files:
        Path(file).touch()
    run = RunConfig.model_validate(
        {"model": {"source": str(tmp_path)}, "data": {"train": files[0], "heldout": files[1]}}
    )
    assert model_dir(run) == str(tmp_path)
    assert dataset_dir(run) is None
    assert data_files(run) == files


def test_artifact_folders_are_those_of_the_design() -> None:
    run = run_with()
    assert tokens_dir(run) == f"results/tokens/pydocs-{tokens_key(run)}"
    assert base_dir(run) == f"results/base/pydocs-base-{base_key(run)}"
    assert stage_dir("demo", "finetune") == "results/runs/demo/finetune"
    assert checkpoint_dir("demo", run) == f"results/checkpoints/demo-{fingerprint(run)}"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_keys_are_twelve_hexadecimal_digits(key: Any) -> None:
    assert len(key(run_with())) == 12
    assert int(key(run_with()), 16) >= 0


def test_report_receives_the_settings_that_make_the_same_runs_again() -> None:
    document = {
        "lora": {"dropout": 0.0},
        "runs": {"a": {"lora": {"r": 4}}, "b": {"train": {"seed": 7}}},
    }
    report, runs = load_config(document)
    received = json.loads(report_json(report, runs))
    assert received["runs"] == {"a": {"lora": {"r": 4}}, "b": {"train": {"seed": 7}}}
    assert load_config(received) == (report, runs)

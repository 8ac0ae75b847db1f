"""Recovery adapters: which runs share one, what depends on it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.artifacts.recoveries import with_recoveries
from workflow.lib.artifacts.scored_models import scored_models
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.settings.config import ReportConfig, RunConfig, load_config
from workflow.lib.settings.effects import Stage
from workflow.lib.settings.objectives import DistillConfig
from workflow.lib.system.errors import UserError

RECOVERED = {"recovery_steps": 20, "recovery_text": "texts.jsonl"}
STAGES: tuple[Stage, ...] = ("quantize_base", "preflight_run", "finetune", "consolidate")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def runs(document: dict[str, Any], **quantize: Any) -> dict[str, RunConfig]:
    shared = {"quantize": RECOVERED | quantize, "runs": document}
    return with_starts(with_recoveries(load_config(shared)[1]))


def recovery_names(found: dict[str, RunConfig]) -> list[str]:
    return [name for name, run in found.items() if run.recovers is not None]


def test_run_starts_from_what_the_original_has_taught_its_base():
    found = runs({"a": {"lora": {"r": 8, "dropout": 0.1}}})
    (name,) = recovery_names(found)
    taught, run = found[name], found["a"]
    assert run.start == taught
    assert layout.start_adapter(run) == f"results/runs/{name}/consolidate/adapter"
    assert layout.recovery_of(run) == f"results/runs/{name}/finetune/adapter"
    assert layout.recovery_of(taught) is None
    assert (taught.train.objective, taught.train.max_steps) == ("distill", 20)
    assert (taught.lora.r, taught.lora.dropout, run.lora.dropout) == (8, 0, 0.1)
    teacher = scored_models(found)[name]
    assert (teacher.base, teacher.model) == (None, layout.model_dir(run))
    assert taught.distill == DistillConfig()
    assert (taught.evaluate.tasks, taught.evaluate.tasks_dir) == ((), None)  # nothing to look up
    assert "start" in run.subjects


@pytest.mark.parametrize(
    "other",
    [
        {"train": {"learning_rate": 1e-5, "seed": 3, "lr_schedule": "linear"}},
        {"train": {"epochs": 1.5}, "data": {"train": "mine.jsonl", "loss_on": "all"}},
        {"train": {"objective": "simpo"}},
        {"lora": {"dropout": 0.2}},
        {"export": {"merged": True}, "evaluate": {"samples": 2}, "hardware": {"gpus": 3}},
    ],
)
def test_runs_that_differ_in_what_does_not_enter_share_a_recovery(other):
    assert len(recovery_names(runs({"a": {}, "b": other}))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"quantize": {"recovery_steps": 21}},
        {"quantize": {"recovery_text": ["texts.jsonl", "more.jsonl"]}},
        {"quantize": {"block_size": 128}},
        {"quantize": {"method": "calibrated"}},
        {"lora": {"r": 4}},
        {"lora": {"target_modules": ["q_proj"]}},
        {"train": {"global_batch_size": 8}},
        {"model": {"source": "elsewhere"}},
    ],
)
def test_base_text_steps_and_shape_make_another_recovery(other):
    found = runs({"a": {}, "b": other})
    assert len(recovery_names(found)) == 2
    assert layout.fingerprint(found["a"]) != layout.fingerprint(found["b"])


@pytest.mark.parametrize("method", ["absmax", "calibrated"])
def test_recovery_is_of_the_base_that_the_run_has_without_it(method):
    plain = runs({"a": {}}, recovery_steps=0, method=method)["a"]
    found = runs({"a": {}}, method=method)
    for run in found.values():
        assert layout.base_dir(run) == layout.base_dir(plain)
        assert layout.calibration_tokens(run) == layout.calibration_tokens(plain)
        assert layout.stage_json("quantize_base", run) == layout.stage_json("quantize_base", plain)


def test_without_steps_all_keys_and_settings_of_stages_are_as_ever():
    found, plain = runs({"a": {}}, recovery_steps=0), load_config({"runs": {"a": {}}})[1]["a"]
    assert [*found] == ["a"]
    assert layout.fingerprint(found["a"]) == layout.fingerprint(plain)
    for stage in STAGES:
        assert layout.stage_json(stage, found["a"]) == layout.stage_json(stage, plain)


def test_recovery_takes_as_many_tokens_as_its_steps():
    found = runs({"a": {"data": {"seq_len": 64}, "train": {"global_batch_size": 8}}})
    (name,) = recovery_names(found)
    asked = layout.stage_settings("tokenize_dataset", found[name])
    assert asked["drawn_tokens"] == 20 * 8 * 64
    assert "drawn_tokens" not in layout.stage_settings("tokenize_dataset", found["a"])


def test_run_that_starts_from_another_has_the_recovery_of_that_one():
    found = runs({"b": {"train": {"start_from": "a"}}, "a": {}})
    (name,) = recovery_names(found)
    assert found["b"].start == found["a"]
    assert layout.recovery_of(found["b"]) == layout.recovery_of(found["a"])
    assert [one.get("run") for one in layout.lineage(found["b"])] == [name, "a"]


def test_runs_of_a_line_with_different_recoveries_are_refused():
    other = {"train": {"start_from": "a"}, "quantize": {"recovery_steps": 5}}
    with pytest.raises(UserError, match=r"quantize\.recovery_steps = 5: set it to 20"):
        runs({"a": {}, "b": other})


def test_reference_start_has_the_recovery_and_the_original_has_none():
    dpo = {"train": {"objective": "dpo"}}
    found = runs({"a": dpo, "b": dpo | {"preferences": {"reference": "original"}}})
    (name,) = recovery_names(found)
    scored = scored_models(found)
    assert scored["a"].model == f"results/runs/{name}/consolidate/adapter"
    assert (scored["b"].base, scored["b"].model) == (None, layout.model_dir(found["b"]))


def test_report_shows_the_settings_that_the_user_gave():
    found = runs({"a": {}})
    (name,) = recovery_names(found)
    assert name not in layout.report_json(ReportConfig(), {"a": found["a"]})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            {"train": {"start_from": "team/adapter"}},
            "'team/adapter' names an adapter from elsewhere",
        ),
        ({"lora": {"use_dora": True}}, "lora.use_dora = true"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save = .*lm_head"),
        ({"model": {"add_tokens": ["<a>"]}}, "model.add_tokens = .*<a>"),
        ({"quantize": {"recovery_steps": -1}}, "quantize.recovery_steps"),
        ({"quantize": {"recovery_text": None}}, "recovery_steps = 20: recovery_text names no text"),
        ({"quantize": {"recovery_text": []}}, r"recovery_text = \[\]: must have at least 1 entry"),
    ],
)
def test_what_is_not_possible_with_a_recovery_is_refused_by_name(run, message):
    with pytest.raises(UserError, match=message):
        runs({"a": run})


def test_text_that_is_not_there_is_named_before_anything_starts():
    run = RunConfig.model_validate({"quantize": RECOVERED, "model": {"source": "team/model"}})
    Path("mine.jsonl").write_text("{}")
    data = run.data.model_copy(update={"train": "mine.jsonl", "heldout": None})
    with pytest.raises(UserError, match=r"quantize.recovery_text \(run a\) = 'texts.jsonl'"):
        check_local_paths("a", run.model_copy(update={"data": data}))


def test_model_that_is_in_4_bits_already_has_no_original_that_teaches(tmp_path):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text(
        json.dumps({"quantization_config": quantization})
    )
    with pytest.raises(UserError, match=r"'taken' is in NF4 already"):
        runs({"a": {"model": {"source": "taken"}}})

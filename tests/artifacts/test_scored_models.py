"""Which model a setting names, and which changes score anew."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_llama
from workflow.lib.artifacts.layout import base_dir, model_dir
from workflow.lib.artifacts.scored_models import ScoredModel, scored_models
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.system.errors import UserError

DPO: dict[str, Any] = {"train": {"objective": "dpo"}}
DISTILL: dict[str, Any] = {"train": {"objective": "distill"}}


def runs_of(**runs: dict[str, Any]) -> dict[str, RunConfig]:
    return load_config({"runs": runs})[1]


def reference(named: str, **more: Any) -> dict[str, Any]:
    return DPO | {"preferences": {"reference": named}} | more


def scored(**runs: dict[str, Any]) -> dict[str, ScoredModel]:
    return scored_models(runs_of(**runs))


def test_supervised_run_reads_no_scores():
    assert scored(demo={}) == {}


def test_start_of_the_training_is_a_reference_without_scores():
    assert scored(a=reference("start"), b=DPO) == {}


def test_words_mean_the_base_and_the_original():
    start = DISTILL | {"distill": {"teacher": "start"}}
    runs = runs_of(a=start, b=reference("original"), c=DISTILL)
    found = scored_models(runs)
    assert (found["a"].base, found["a"].model) == (base_dir(runs["a"]), None)
    assert (found["b"].base, found["b"].model) == (None, model_dir(runs["b"]))
    assert (found["c"].setting, found["c"].model) == ("distill.teacher", model_dir(runs["c"]))
    assert [model.top_k for model in found.values()] == [32, 0, 32]


def test_run_means_its_adapter_on_its_own_base():
    runs = runs_of(sft={"quantize": {"block_size": 128}}, dpo=reference("sft"))
    found = scored_models(runs)["dpo"]
    assert found.base == base_dir(runs["sft"])
    assert found.model == "results/runs/sft/consolidate/adapter"
    assert f"{found.model}/adapter_model.safetensors" in found.files


def test_start_as_a_teacher_is_the_adapter_that_the_run_starts_from():
    start = {"distill": {"teacher": "start"}}
    runs = with_starts(
        runs_of(
            sft={},
            student=start | {"train": {"objective": "distill", "start_from": "sft"}},
            named=DISTILL | {"distill": {"teacher": "sft"}},
            new=DISTILL | start,
        )
    )
    found = scored_models(runs)
    assert found["student"].base == base_dir(runs["student"])
    assert found["student"].model == "results/runs/sft/consolidate/adapter"
    assert found["named"].scores == found["student"].scores != found["new"].scores


def test_folder_is_an_adapter_on_the_base_or_a_model(tmp_path):
    model, adapter = tiny_llama(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    runs = runs_of(a=reference(str(model)), b=reference(str(adapter)))
    found = scored_models(runs)
    assert (found["a"].base, found["a"].model) == (None, str(model))
    assert (found["b"].base, found["b"].model) == (base_dir(runs["b"]), str(adapter))
    assert str(model / "model.safetensors") in found["a"].files


def test_hub_id_is_downloaded():
    found = scored(a=reference("owner/other"))["a"]
    assert found.model is not None
    assert found.model.startswith("results/hub/scored/other-")
    assert found.files == (found.model,)
    assert found.download is not None
    assert found.download["repo_id"] == "owner/other"


SAME: list[dict[str, Any]] = [
    {"preferences": {"reference": "original", "beta": 0.3}},
    {"preferences": {"reference": "original"}, "train": {"objective": "ipo", "seed": 5}},
    {"preferences": {"reference": "original"}, "lora": {"r": 4}},
]
OTHER: list[dict[str, Any]] = [
    {"preferences": {"reference": "owner/other"}},
    {"preferences": {"reference": "original"}, "data": {"seq_len": 128}},
    {"preferences": {"reference": "original"}, "model": {"compute_dtype": "float32"}},
]


@pytest.mark.parametrize("change", SAME)
def test_sweep_shares_scores(change):
    found = scored(a=reference("original"), b=DPO | change)
    assert found["a"].scores == found["b"].scores


@pytest.mark.parametrize("change", OTHER)
def test_other_model_or_tokens_are_scored_anew(change):
    found = scored(a=reference("original"), b=DPO | change)
    assert found["a"].scores != found["b"].scores


def test_temperature_scores_nothing_anew_and_k_does():
    runs = {
        "a": DISTILL,
        "b": DISTILL | {"distill": {"temperature": 2.0}},
        "c": DISTILL | {"distill": {"top_k": 8}},
    }
    found = scored(**runs)
    assert found["a"].scores == found["b"].scores != found["c"].scores


def test_changed_run_is_another_reference():
    one, two = (
        scored(sft={"train": {"seed": seed}}, dpo=reference("sft"))["dpo"] for seed in (0, 1)
    )
    assert one.scores != two.scores


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({"a": reference("nothing")}, "(run a) = 'nothing': it is no run, no folder here"),
        ({"a": reference("a")}, "would wait for each other: a -> a"),
        ({"a": reference("b"), "b": reference("a")}, "would wait for each other: a -> b -> a"),
        ({"a": reference("b"), "b": reference("c"), "c": reference("b")}, "b -> c -> b"),
        ({"a": reference("b"), "b": {"train": {"start_from": "a"}}}, "other: a -> b -> a"),
        ({"original": {}, "b": reference("original")}, "are words of this setting"),
        ({"a": reference(str(Path(__file__).parent))}, "the folder has neither config.json"),
    ],
)
def test_name_that_means_no_model_is_one_message(runs, said):
    with pytest.raises(UserError) as caught:
        scored(**runs)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_as_a_reference_is_refused(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"neither config\.json"):
        scored(a=reference(str(path)))

"""What runs start from: the order of runs, their settings, their folders and keys."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints.files.test_adapter_config import OLD
from workflow.lib.artifacts import layout
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.system.errors import UserError


def runs(document: dict[str, Any], **shared: Any) -> dict[str, RunConfig]:
    return with_starts(load_config(shared | {"runs": document})[1])


def start(name: str | None, **rest: Any) -> dict[str, Any]:
    return {"train": {"start_from": name}} | rest


def adapter(folder: Path, *files: str, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(OLD | changes))
    for name in files:
        save_file({"lora_A": np.zeros((2, 3), dtype=np.float32)}, folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_follow_the_first_of_their_line_whatever_their_order():
    found = runs({"c": start("b"), "b": start("a"), "a": {"lora": {"r": 8}}})
    assert [*found] == ["c", "b", "a"]
    assert {run.lora.r for run in found.values()} == {8}
    assert found["c"].start == found["b"]
    assert layout.start_adapter(found["c"]) == "results/runs/b/consolidate/adapter"
    assert layout.lineage(found["c"]) == [
        {"run": name, "data": "data", "objective": "sft"} for name in "ab"
    ]


def test_line_shares_tokens_and_the_base_that_its_first_run_calibrates():
    document = {"b": start("a", data={"seq_len": 64}), "a": {}, "other": {"data": {"seq_len": 64}}}
    found = runs(document, quantize={"method": "calibrated"})
    assert layout.base_dir(found["a"]) == layout.base_dir(found["b"])
    assert layout.calibration_tokens(found["a"]) == layout.calibration_tokens(found["b"])
    assert layout.base_dir(found["other"]) != layout.base_dir(found["a"])
    assert layout.tokens_dir(found["other"]) == layout.tokens_dir(found["b"])


def test_changed_first_run_is_another_start():
    one, other = (
        runs({"a": {"train": {"learning_rate": rate}}, "b": start("a")}) for rate in (1e-3, 1e-4)
    )
    assert layout.fingerprint(one["b"]) != layout.fingerprint(other["b"])
    assert layout.stage_settings("preflight_run", one["b"]) == layout.stage_settings(
        "preflight_run", runs({"b": {}})["b"]
    )


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"a": start("a")}, "a from a"),
        (
            {"x": {}, "a": start("c"), "b": start("a"), "c": start("b")},
            "a from c, c from b, b from a",
        ),
    ],
)
def test_circle_is_one_message_that_names_the_runs(document, line):
    with pytest.raises(UserError, match=f"the runs start from each other: {line}"):
        runs(document)


def test_all_that_differs_from_the_start_is_one_message():
    with pytest.raises(UserError) as error:
        runs({"a": {}, "b": start("a", lora={"alpha": 5.0}, quantize={"block_size": 128})})
    assert "quantize.block_size = 128: set it to 64" in str(error.value)
    assert "lora.alpha = 5.0: set it to 32.0" in str(error.value)


def test_folder_is_followed_and_its_files_are_inputs():
    adapter(Path("theirs"), "adapter_model.safetensors")
    (run,) = runs({"b": start("theirs", lora={"dropout": 0.5})}).values()
    assert (run.lora.r, run.lora.dropout, run.start) == (64, 0.5, None)
    assert layout.start_files(run) == [
        "theirs/adapter_model.safetensors",
        "theirs/adapter_config.json",
    ]
    assert layout.lineage(run) == [{"adapter": "theirs"}]


def test_name_of_a_run_counts_before_a_folders():
    adapter(Path("a"), "adapter_model.safetensors")
    found = runs({"a": {}, "b": start("a"), "c": start("./a")})
    assert layout.start_adapter(found["b"]) == "results/runs/a/consolidate/adapter"
    assert layout.start_adapter(found["c"]) == "./a"
    assert (found["b"].lora.r, found["c"].lora.r) == (16, 64)


@pytest.mark.parametrize(
    ("name", "files", "text"),
    [
        ("nowhere", None, "it is no run, no folder and no hub id (owner/name); other runs are a"),
        ("~/theirs", None, "it is no run, no folder"),
        ("theirs", [], "it has no adapter_model.safetensors"),
        ("theirs/adapter_config.json", [], "it is a file. Name the folder of the adapter"),
        ("theirs", ["adapter_model.bin"], "weights_only=True"),
    ],
)
def test_start_that_is_nothing_is_refused(name, files, text):
    if files is not None:
        adapter(Path("theirs"), *files)
    with pytest.raises(UserError) as error:
        runs({"a": {}, "b": start(name)})
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("rows", "added", "told"),
    [
        ({"embed_tokens": [5, 6]}, [], "are {'embed_tokens': [5, 6]}, and model.add_tokens = []"),
        (None, ["<a>"], "are None, and model.add_tokens = ['<a>']"),
    ],
)
def test_rows_of_tokens_that_only_one_of_both_trains_are_refused(rows, added, told):
    folder = adapter(Path("other"), "adapter_model.safetensors", trainable_token_indices=rows)
    document = {"a": start(f"./{folder}", model={"add_tokens": added})}
    with pytest.raises(UserError, match=re.escape(f"its trainable_token_indices {told}. Set ")):
        runs(document)


def test_model_is_no_start():
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no adapter_config\.json.*set model\.source to it"):
        runs({"b": start("model")})


def test_download_is_compared_and_not_followed():
    (run,) = runs({"b": start("owner/name")}).values()
    folder = layout.download_dirs(run)["adapter"]
    assert layout.start_files(run) == [folder]
    assert layout.download_settings("adapter", run) == {
        "repo_id": "owner/name",
        "revision": None,
        "kind": "adapter",
        "files": None,
    }
    Path(folder).parent.mkdir(parents=True)
    adapter(Path(folder))
    with pytest.raises(UserError, match=r"lora\.r = 16: set it to 64"):
        runs({"b": start("owner/name")})
    same = {"r": 64, "alpha": 16, "target_modules": ["v_proj", "q_proj"]}
    assert runs({"b": start("owner/name", lora=same)})["b"].lora.r == 64


def test_adapter_of_the_run_before_is_measured_too():
    found = runs(
        {"a": {}, "b": start("a"), "c": start("a", evaluate={"subjects": ["base", "tuned"]})}
    )
    assert found["a"].subjects == ("original", "base", "tuned")
    assert found["b"].subjects == ("original", "base", "start", "tuned")
    assert found["c"].subjects == ("base", "tuned")


def test_reference_of_preferences_is_measured_whatever_the_subjects():
    chosen = {"evaluate": {"subjects": ["original", "tuned"]}}
    dpo = {"train": {"objective": "dpo"}, **chosen}
    found = runs(
        {"a": dpo, "b": start("a", **chosen) | {"train": dpo["train"] | {"start_from": "a"}}}
    )
    assert found["a"].subjects == ("original", "base", "tuned")
    assert found["b"].subjects == ("original", "start", "tuned")


def test_start_of_a_new_adapter_is_no_subject():
    with pytest.raises(UserError, match=r"evaluate\.subjects \(run a\) = 'start': .*is no start"):
        runs({"a": {"evaluate": {"subjects": ["base", "start", "tuned"]}}})

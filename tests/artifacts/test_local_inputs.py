"""Local paths in settings: each exists, is written out, and is no id of the hub."""

import os

import pytest

from tests.support.settings_examples import only
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.settings.overrides import merge
from workflow.lib.system.errors import UserError


def local_run(folder, **changes):
    """Return a run whose local paths lie in `folder`, which gets all of them."""
    for name in ("base", "tasks"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text("{}")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "base" / name).touch()
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).touch()
    document = {
        "model": {"source": f"{folder}/base"},
        "data": {"train": f"{folder}/train.jsonl", "heldout": f"{folder}/heldout.jsonl"},
        "evaluate": {"tasks": ["own"], "tasks_dir": f"{folder}/tasks"},
    }
    return only(merge(document, changes))


def test_folder_of_tasks_is_asked_for_by_runs_with_tasks_alone(tmp_path):
    nowhere = {"tasks_dir": f"{tmp_path}/missing"}
    check_local_paths("demo", local_run(tmp_path, evaluate=nowhere | {"tasks": []}))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model", "source"),
        ("data", "train"),
        ("data", "heldout"),
        ("data", "chat_template"),
        ("evaluate", "tasks_dir"),
    ],
)
def test_missing_path_names_setting_run_and_change(tmp_path, section, key):
    run = local_run(tmp_path, **{section: {key: f"{tmp_path}/missing"}})
    with pytest.raises(UserError) as refusal:
        check_local_paths("demo", run)
    message = str(refusal.value)
    assert f"{section}.{key} = '{tmp_path}/missing'" in message
    assert "run demo" in message
    assert "there is no such file or folder. Give a path that exists" in message


@pytest.mark.parametrize(
    ("section", "key", "path", "said"),
    [
        ("model", "source", "base/model.safetensors", "it is a file. Name a folder"),
        ("evaluate", "tasks_dir", "train.jsonl", "it is a file. Name a folder"),
        ("data", "chat_template", "base", "it is a folder. Name a file in it"),
        ("quantize", "calibration_text", "base", "it is a folder. Name a file in it"),
    ],
)
def test_file_for_a_folder_or_a_folder_for_a_file_is_refused(tmp_path, section, key, path, said):
    local_run(tmp_path)
    run = local_run(tmp_path, **{section: {key: f"{tmp_path}/{path}"}})
    with pytest.raises(UserError) as refusal:
        check_local_paths("demo", run)
    assert str(refusal.value).startswith(
        f"{section}.{key} (run demo) = '{tmp_path}/{path}': {said}"
    )


@pytest.mark.parametrize("path", ["~/missing", "$HOME/missing", "${HOME}/missing", "a/$X/b"])
@pytest.mark.parametrize(
    ("section", "key"),
    [("model", "source"), ("data", "train"), ("data", "chat_template"), ("evaluate", "tasks_dir")],
)
def test_path_that_a_shell_would_expand_is_to_be_written_out(tmp_path, section, key, path):
    run = local_run(tmp_path, **{section: {key: path}})
    with pytest.raises(
        UserError, match=rf"{section}\.{key} = .*\$NAME are not expanded in settings"
    ):
        check_local_paths("demo", run)


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("data/mine", "a file or folder of this name is here"),
        ("./nowhere", "no dataset of the hub has such an id"),
        ("data/deep/er", "no dataset of the hub has such an id"),
        ("~/data", "no dataset of the hub has such an id"),
    ],
)
def test_local_path_as_dataset_of_the_hub_is_told_where_it_belongs(
    tmp_path, monkeypatch, source, bound
):
    (tmp_path / "data" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = local_run(tmp_path, data={"source": source, "train": "a.jsonl", "heldout": None})
    with pytest.raises(UserError, match=rf"{bound}.*Set data\.source to null, and data\.train to"):
        check_local_paths("demo", run)


@pytest.mark.parametrize("source", ["imdb", "owner/data-set_1.0"])
def test_id_of_a_dataset_passes(tmp_path, source):
    hub = {"source": source, "train": "train.jsonl", "heldout": None}
    check_local_paths("demo", local_run(tmp_path, data=hub))


def test_revision_of_a_local_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a local directory, which has no revision"):
        check_local_paths("demo", local_run(tmp_path, model={"revision": "main"}))


@pytest.mark.parametrize("source", ["model.gguf", "", "owner/model.gguf"])
def test_gguf_file_as_base_model_is_told_how_to_convert_it(tmp_path, source):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.gguf").touch()
    named = source if "/" in source else str(folder / source)
    run = local_run(tmp_path, model={"source": named})
    with pytest.raises(UserError, match=r"it is a GGUF file.*gguf_file='model\.gguf'"):
        check_local_paths("demo", run)


def test_folder_with_a_gguf_file_beside_its_weights_passes(tmp_path):
    run = local_run(tmp_path)
    (tmp_path / "base" / "model.gguf").touch()
    check_local_paths("demo", run)


OTHER_FOLDERS = {
    "adapter": (["adapter_config.json", "adapter_model.safetensors"], "it is an adapter"),
    "adapter-beside-model": (
        ["adapter_config.json", "config.json", "model.safetensors"],
        "Transformers loads that adapter with it",
    ),
    "no-config": (["model.safetensors", "tokenizer.json"], "it has no config.json; it has model."),
    "no-weights": (["config.json", "tokenizer.json"], "it has no weights, neither"),
    "pickles": (["config.json", "pytorch_model.bin"], "only pytorch_model.bin (pickles"),
    "mistral": (["config.json", "consolidated.safetensors"], "(Mistral's own format)"),
    "variant": (["config.json", "model.fp16.safetensors"], "(a variant, which Transformers"),
    "shards": (
        ["config.json", "model-00001-of-00002.safetensors"],
        "(shards without model.safetensors.index.json)",
    ),
    "no-tokenizer": (["config.json", "model.safetensors"], "it has no tokenizer; it has config."),
    "tekken": (
        ["config.json", "model.safetensors", "tekken.json"],
        "its only tokenizer is tekken.json, Mistral's own format",
    ),
}


@pytest.mark.parametrize(("files", "bound"), OTHER_FOLDERS.values(), ids=OTHER_FOLDERS)
def test_folder_that_holds_no_model_says_what_it_holds(tmp_path, files, bound):
    folder = tmp_path / "other"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(UserError) as refusal:
        check_local_paths("demo", local_run(tmp_path, model={"source": str(folder)}))
    assert str(refusal.value).startswith(f"model.source = '{folder}': ")
    assert bound in str(refusal.value)


def test_weights_that_config_json_names_are_the_model(tmp_path):
    run = local_run(tmp_path)
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "own.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    check_local_paths("demo", run)


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [
        ("base/config.json", "model", "source"),
        ("base/tokenizer.json", "model", "source"),
        ("train.jsonl", "data", "train"),
        ("heldout.jsonl", "data", "heldout"),
        ("template.jinja", "data", "chat_template"),
        ("tasks/one.yaml", "evaluate", "tasks_dir"),
        ("text", "quantize", "calibration_text"),
    ],
)
def test_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path, name, section, key):
    run = local_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    value = getattr(getattr(run, section), key) or f"{tmp_path}/{name}"
    changed = local_document(run, section, key, value)
    with pytest.raises(UserError, match=rf"{section}\.{key}.* it is a pipe"):
        check_local_paths("demo", changed)


def local_document(run, section, key, value):
    part = getattr(run, section).model_copy(update={key: value})
    return run.model_copy(update={section: part})


@pytest.mark.parametrize("name", ["<run>", "a<b", "{run}"])
def test_characters_that_snakemake_replaces_are_refused_in_every_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(UserError, match="Snakemake reads"):
        check_local_paths("demo", local_run(folder))
    run = local_run(tmp_path)
    (tmp_path / "base" / f"{name}.json").touch()
    with pytest.raises(UserError, match=r"model\.source.*Snakemake reads"):
        check_local_paths("demo", run)

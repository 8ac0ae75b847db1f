"""Settings: defaults, bounds, overrides by runs, and messages that a person can act on."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.settings.config import (
    Config,
    RunConfig,
    Section,
    check_yaml,
    is_hub_id,
    json_schema,
    load_config,
    merge,
)
from workflow.lib.settings.errors_in_words import explain, is_section
from workflow.lib.system.errors import UserError


def message(document: Mapping[str, Any]) -> list[str]:
    """Return the lines of the refusal of a document, without the headline."""
    with pytest.raises(UserError) as refusal:
        load_config(document)
    headline, *lines = str(refusal.value).splitlines()
    assert headline == "the settings are not valid:"
    return [line.strip() for line in lines]


def only(document: Mapping[str, Any]) -> RunConfig:
    """Return the settings of the one run of a document."""
    (run,) = load_config(document)[1].values()
    return run


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield the path and description of every setting and section."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field.description
        if is_section(model, name):
            assert isinstance(field.annotation, type)
            yield from fields(field.annotation, f"{path}{name}.")


def test_empty_document_gives_the_demo_run_with_all_defaults() -> None:
    report, runs = load_config({})
    assert report == Config().report
    assert runs == {"demo": RunConfig()}


def test_written_out_defaults_load_to_the_defaults() -> None:
    assert only(RunConfig().model_dump(mode="json")) == RunConfig()


@pytest.mark.parametrize("section", [name for name in Config.model_fields if name != "runs"])
def test_section_with_nothing_below_it_means_its_defaults(section: str) -> None:
    assert load_config({section: None}) == load_config({})


def test_nested_section_with_nothing_below_it_means_its_defaults() -> None:
    assert only({"data": {"columns": None}}) == RunConfig()


@pytest.mark.parametrize(("path", "description"), list(fields(Config)))
def test_every_setting_is_described(path: str, description: str | None) -> None:
    assert description is not None
    assert len(description) > 10


def test_schema_for_editors_describes_every_section() -> None:
    sections = json_schema()["$defs"]
    described = [
        property_.get("description")
        for section in sections.values()
        for property_ in section["properties"].values()
    ]
    assert len(sections) == 13
    assert all(described)


def test_schema_refuses_unknown_keys_too() -> None:
    assert json_schema()["additionalProperties"] is False


def test_unknown_key_is_answered_with_the_nearest_one() -> None:
    assert message({"train": {"learing_rate": 1e-4}}) == [
        "train.learing_rate: there is no such key. Did you mean 'learning_rate'?"
    ]


def test_unknown_key_of_a_nested_section_is_answered_with_the_nearest_one() -> None:
    assert message({"data": {"columns": {"promt": "question"}}}) == [
        "data.columns.promt: there is no such key. Did you mean 'prompt'?"
    ]


def test_unknown_key_of_a_source_is_answered_with_its_entry_and_the_nearest_one() -> None:
    sources = ["a", {"path": "b", "wieght": 2}]
    assert message({"data": {"train": sources}}) == [
        "data.train.2.wieght: there is no such key. Did you mean 'weight'?"
    ]


def test_source_takes_over_what_it_does_not_set() -> None:
    sources = ["a", {"path": "b", "format": "text", "columns": {"text": "body"}}]
    data = only({"data": {"train": sources, "file_type": "json", "format": "alpaca"}}).data
    first, second = data.train_sources
    assert (first.path, first.file_type, first.format) == ("a", "json", "alpaca")
    assert (second.path, second.file_type, second.format) == ("b", "json", "text")
    assert second.columns is not None
    assert second.columns.text == "body"


def test_key_in_the_wrong_place_is_answered_with_its_section() -> None:
    assert message({"learning_rate": 1e-4}) == [
        "learning_rate: there is no such key. Did you mean 'train.learning_rate'?"
    ]


def test_unknown_key_without_a_near_one_lists_the_valid_keys() -> None:
    assert message({"quantize": {"zzz": 1}}) == [
        "quantize.zzz: there is no such key. Valid keys: block_size, double_quant."
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("train", "learning_rate", 0, "must be above 0.0"),
        ("train", "learning_rate", 1.5, "must be at most 1.0"),
        ("train", "learning_rate", float("nan"), "must be finite"),
        ("train", "warmup_share", -0.1, "must be at least 0.0"),
        ("train", "adam_beta1", 1.0, "must be below 1.0"),
        ("train", "seed", 0.5, "must be a whole number"),
        ("train", "lr_schedule", "step", "must be 'cosine', 'linear' or 'constant'"),
        ("train", "micro_batch_size", "x", "must be a whole number or 'auto'"),
        ("train", "activation_checkpointing", "maybe", "must be true, false, auto or a number"),
        ("evaluate", "shard", "maybe", "must be true, false or auto"),
        (
            "train",
            "activation_checkpointing",
            1.5,
            "must be true or false or a whole number or 'auto'",
        ),
        ("hardware", "gpus", "two", "must be a whole number or 'auto'"),
        ("hardware", "host_memory_gib", [], "must be a number or 'auto'"),
        ("hardware", "offload_embedding", "yes", "must be true, false or auto"),
        ("lora", "target_modules", 3, "must be a list or text"),
        ("lora", "target_modules", ["q", 3], "entry 2 must be text"),
        ("evaluate", "tasks", [7], "entry 1 must be text"),
        ("model", "source", "", "must not be empty"),
        ("model", "source", "a" * 1025, "must have at most 1024 characters"),
        ("model", "name", 7, "must be text"),
        ("quantize", "block_size", 65, "must be 64, 128, 256 or 512"),
        ("data", "columns", 7, "must be a section (keys below it)"),
        ("data", "train", 7, "must be text"),
        ("data", "train", ["a", 7], "entry 2 must be text"),
        ("data", "train", [["a"]], "entry 1 must be text"),
        ("data", "train", {"weight": 2}, "path must be given"),
        ("data", "train", {"path": "a", "columns": {"text": 1}}, "columns.text must be text"),
        (
            "data",
            "heldout",
            ["a", {"path": "a", "format": "x"}],
            "format of entry 2 must be 'auto', 'messages', 'prompt_completion', 'alpaca', 'tokens' "
            "or 'text'",
        ),
    ],
)
def test_wrong_value_gives_one_line_with_setting_value_bound_and_change(
    section: str, key: str, value: object, bound: str
) -> None:
    assert message({section: {key: value}}) == [
        f"{section}.{key} = {value!r}: {bound}. Change it in config.yaml."
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("train", "micro_batch_size", 17, "must be between 1 and global_batch_size = 16"),
        ("train", "micro_batch_size", 0, "must be between 1 and global_batch_size = 16"),
        ("hardware", "gpus", -1, "must be 0 to 4096"),
        ("hardware", "gpu_memory_gib", 0, "must be above 0"),
        (
            "lora",
            "modules_to_save",
            ["lm_head", ""],
            "modules_to_save has an empty name: name lm_head, embed_tokens or both",
        ),
        ("lora", "target_modules", [], "target_modules has an empty name or none at all"),
        ("lora", "target_modules", [""], "target_modules has an empty name or none at all"),
        ("data", "revision", "v1", "revision is set but source is null"),
        ("data", "train", [], "train = []: the list is empty. Name a file, folder or glob"),
        ("data", "heldout", {"path": "a", "weight": 2}, "heldout gives 'a' a weight"),
    ],
)
def test_value_that_does_not_fit_its_section_names_section_and_bound(
    section: str, key: str, value: object, bound: str
) -> None:
    (line,) = message({section: {key: value}})
    assert line.startswith(f"{section}: ")
    assert bound in line


def test_all_mistakes_are_reported_at_once() -> None:
    assert len(message({"train": {"seed": -1, "typo": 1}, "lora": {"r": 0}})) == 3


@pytest.mark.parametrize("length", [{"epochs": None}, {"epochs": 1.0, "max_steps": 7}])
def test_exactly_one_of_epochs_and_max_steps_is_demanded(length: dict[str, Any]) -> None:
    (line,) = message({"train": length})
    assert "exactly one sets the length. Set the other to null." in line


def test_max_steps_alone_is_accepted() -> None:
    assert only({"train": {"epochs": None, "max_steps": 7}}).train.max_steps == 7


def test_number_that_yaml_reads_as_text_is_accepted() -> None:
    assert only({"train": {"learning_rate": "2e-4"}}).train.learning_rate == 2e-4


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "a/b", "x" * 65, "é"])
def test_run_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    assert message({"runs": {name: {}}}) == [
        f"runs: the name {name!r} may have letters, digits, '.', '_' and '-', up to 64, "
        "a letter or digit first. Change it in config.yaml."
    ]


def test_run_name_that_yaml_reads_as_a_number_is_refused() -> None:
    assert message({"runs": {7: {}}}) == [
        "runs: the name 7 must be text. Put it in quotes in config.yaml: without them YAML reads "
        "no, off "
        "and the like as false, and 1.5 as a number."
    ]


def test_key_that_yaml_reads_as_a_number_is_refused() -> None:
    assert message({"train": {7: 1}}) == ["train.7: a key must be text. Change it in config.yaml."]


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ({}, "runs = {}: must have at least 1 entry. Change it in config.yaml."),
        (None, "runs = None: must be a section (keys below it). Change it in config.yaml."),
        ({"a": 3}, "runs.a = 3: must be a section (keys below it). Change it in config.yaml."),
        (
            {"a": {"lora": {"r": 0}}},
            "runs.a.lora.r = 0: must be at least 1. Change it in config.yaml.",
        ),
        (
            {"a": {"runs": {}}},
            "runs.a.runs: there is no such key. Valid keys: "
            "model, data, quantize, lora, train, hardware, tracking, export, evaluate.",
        ),
        (
            {"a": {"train": {"max_steps": 5}}},
            "runs.a.train: epochs = 3.0 and max_steps = 5: exactly one sets the length. "
            "Set the other to null.",
        ),
    ],
)
def test_mistake_in_a_run_is_named_by_the_path_in_the_file(runs: object, line: str) -> None:
    assert message({"runs": runs}) == [line]


def test_run_overrides_single_keys_and_keeps_the_shared_ones() -> None:
    document = {
        "lora": {"r": 8, "alpha": 11.0},
        "runs": {"small": {"lora": {"r": 3}}, "shared": None},
    }
    runs = load_config(document)[1]
    assert [(run.lora.r, run.lora.alpha) for run in runs.values()] == [(3, 11.0), (8, 11.0)]


def test_run_with_an_empty_section_keeps_the_shared_one() -> None:
    assert only({"lora": {"r": 3}, "runs": {"a": {"lora": None}}}).lora.r == 3


def test_run_can_set_a_shared_value_to_null() -> None:
    run = only({"train": {"epochs": 2}, "runs": {"a": {"train": {"epochs": None, "max_steps": 5}}}})
    assert (run.train.epochs, run.train.max_steps) == (None, 5)


def test_merge_replaces_lists_and_leaves_its_inputs_alone() -> None:
    base = {"a": {"list": [1, 2], "kept": 1}}
    override = {"a": {"list": [3]}}
    assert merge(base, override) == {"a": {"list": [3], "kept": 1}}
    assert (base, override) == ({"a": {"list": [1, 2], "kept": 1}}, {"a": {"list": [3]}})


def test_settings_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.seed = 1  # type: ignore[misc]


KEYS = sorted({path.split(".")[-1] for path, _ in fields(Config)})
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("auto")
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=3) | st.integers(),
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=7,
    ),
    max_size=4,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(DOCUMENTS)
def test_no_document_fails_otherwise_than_by_a_user_error(document: dict[Any, Any]) -> None:
    with contextlib.suppress(UserError):
        load_config(document)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(DOCUMENTS, DOCUMENTS)
def test_no_override_fails_otherwise_than_by_a_user_error(
    shared: dict[Any, Any], override: dict[Any, Any]
) -> None:
    with contextlib.suppress(UserError):
        load_config(shared | {"runs": {"a": override}})


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("owner/name", True),
        ("owner/name/", False),
        ("name", False),
        ("./owner/name", False),
        ("../name", False),
        ("~/name", False),
        ("/abs/name", False),
        ("a/b/c", False),
        ("$HOME/name", False),
        ("my models/name", False),
        ("meta-llama/Llama-3.1-8B", True),
    ],
)
def test_hub_id_is_owner_and_name(source: str, is_id: bool) -> None:
    assert is_hub_id(source) is is_id


def test_existing_folder_of_two_parts_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("owner/name")


def local_run(folder: Path, **changes: dict[str, Any]) -> RunConfig:
    """Return a run whose local paths lie in `folder`, which gets all of them."""
    for name in ("base", "tasks"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).touch()
    document = {
        "model": {"source": f"{folder}/base"},
        "data": {"train": f"{folder}/train.jsonl", "heldout": f"{folder}/heldout.jsonl"},
        "evaluate": {"tasks_dir": f"{folder}/tasks"},
    }
    return only(merge(document, changes))


def test_run_whose_paths_exist_passes(tmp_path: Path) -> None:
    check_local_paths("demo", local_run(tmp_path))


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
def test_missing_path_names_setting_run_and_change(tmp_path: Path, section: str, key: str) -> None:
    run = local_run(tmp_path, **{section: {key: f"{tmp_path}/missing"}})
    with pytest.raises(UserError) as refusal:
        check_local_paths("demo", run)
    message = str(refusal.value)
    assert f"{section}.{key} = '{tmp_path}/missing'" in message
    assert "run demo" in message
    assert "there is no such file or folder. Give a path that exists" in message


def test_files_of_a_hub_dataset_are_not_looked_for_here(tmp_path: Path) -> None:
    hub = {"source": "owner/data", "train": "train.jsonl", "heldout": None}
    check_local_paths("demo", local_run(tmp_path, data=hub))


@pytest.mark.parametrize("path", ["~/missing", "$HOME/missing", "${HOME}/missing", "a/$X/b"])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model", "source"),
        ("data", "train"),
        ("data", "chat_template"),
        ("evaluate", "tasks_dir"),
        ("hardware", "calibration"),
    ],
)
def test_path_that_a_shell_would_expand_is_to_be_written_out(
    tmp_path: Path, section: str, key: str, path: str
) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, bound: str
) -> None:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = local_run(tmp_path, data={"source": source, "train": "a.jsonl", "heldout": None})
    with pytest.raises(UserError, match=rf"{bound}.*Set data\.source to null, and data\.train to"):
        check_local_paths("demo", run)


@pytest.mark.parametrize("source", ["imdb", "owner/data-set_1.0"])
def test_id_of_a_dataset_passes(tmp_path: Path, source: str) -> None:
    hub = {"source": source, "train": "train.jsonl", "heldout": None}
    check_local_paths("demo", local_run(tmp_path, data=hub))


def test_revision_of_a_local_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a local directory, which has no revision"):
        check_local_paths("demo", local_run(tmp_path, model={"revision": "main"}))


def test_every_section_class_is_frozen_and_refuses_unknown_keys() -> None:
    assert Section.model_config["frozen"]
    assert Section.model_config["extra"] == "forbid"


def test_setting_that_must_be_given_is_named_without_a_value() -> None:
    """No setting is of this kind yet."""

    class Inner(BaseModel):
        name: str

    class Document(BaseModel):
        inner: Inner

    with pytest.raises(ValidationError) as refusal:
        Document.model_validate({"inner": {}})
    lines = explain(Document, {"inner": {}}, refusal.value)
    assert lines == ["inner.name: must be given. Change it in config.yaml."]


NO_SETTINGS = {
    "key twice": (
        "train:\n  seed: 1\nlora: {r: 2}\ntrain:\n  seed: 2\n",
        4,
        "the key train stands",
    ),
    "key of a run twice": (
        "runs:\n  a:\n    train:\n      seed: 1\n      seed: 2\n",
        5,
        "the key runs.a.train.seed stands",
    ),
    "key within a list twice": (
        "data:\n  train:\n    - path: a\n      path: b\n",
        4,
        "data.train.path",
    ),
    "tab": ("train:\n\tseed: 1\n", 2, "indent with spaces"),
    "open bracket": ("a: 1\nb: [1,\n", 3, "this is no YAML"),
    "unknown tag": ("a: 1\nb: !include c\n", 2, "this is no YAML"),
    "JSON with a key twice": ('{\n\t"seed": 1,\n\t"seed": 2\n}\n', 3, "the key seed stands"),
}


@pytest.mark.parametrize(("text", "line", "said"), NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_mistake_of_yaml_is_named_with_file_and_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        check_yaml(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert said in str(caught.value)


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"mine\.yaml: it cannot be read as YAML"):
        check_yaml(path)


def test_anchors_merged_keys_and_the_same_key_elsewhere_are_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "x-fast: &fast {train: {seed: 1}}\nruns:\n  a: *fast\n  b:\n    <<: *fast\n    lora: {r: "
        "2}\n"
    )
    check_yaml(path)


def test_keys_of_the_users_own_are_ignored_at_the_top_level_alone() -> None:
    _, runs = load_config({"x-fast": {"anything": 1}, "runs": {"a": {}}})
    assert runs == {"a": RunConfig()}
    for document in ({"train": {"x-fast": 1}}, {"runs": {"a": {"x-fast": 1}}}):
        with pytest.raises(UserError, match="x-fast: there is no such key"):
            load_config(document)


@pytest.mark.parametrize("name", [False, True, 1.5, 7])
def test_name_of_a_run_that_yaml_takes_for_something_else_is_to_be_quoted(name: Any) -> None:
    with pytest.raises(
        UserError, match=rf"runs: the name {name!r} must be text\. Put it in quotes"
    ):
        load_config({"runs": {name: {}}})


def test_runs_that_a_file_system_may_take_for_one_are_refused() -> None:
    with pytest.raises(UserError, match="runs: 'wide' and 'Wide' differ in case alone"):
        load_config({"runs": {"wide": {}, "other": {}, "Wide": {}}})

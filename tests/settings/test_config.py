"""Settings: defaults, descriptions, and overrides by runs."""

import pytest

from tests.support.settings_examples import only
from workflow.lib.settings.config import Config, RunConfig, is_hub_id, load_config
from workflow.lib.settings.errors_in_words import is_section
from workflow.lib.settings.overrides import merge
from workflow.lib.system.errors import UserError


def fields(model, path=""):
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field.description
        if is_section(model, name):
            assert isinstance(field.annotation, type)
            yield from fields(field.annotation, f"{path}{name}.")


def test_empty_document_gives_one_run_with_all_defaults():
    report, runs = load_config({})
    assert report == Config().report
    assert runs == {"first": RunConfig()}


def test_written_out_defaults_load_to_the_defaults():
    assert only(RunConfig().model_dump(mode="json")) == RunConfig()


@pytest.mark.parametrize("section", [name for name in Config.model_fields if name != "runs"])
def test_section_with_nothing_below_it_means_its_defaults(section):
    assert load_config({section: None}) == load_config({})
    assert only({"data": {"columns": None}}) == RunConfig()


def test_every_setting_is_described():
    assert [path for path, said in fields(Config) if said is None or len(said) <= 10] == []


def test_source_takes_over_what_it_does_not_set():
    sources = ["a", {"path": "b", "format": "text", "columns": {"text": "body"}}]
    data = only({"data": {"train": sources, "file_type": "json", "format": "alpaca"}}).data
    first, second = data.train_sources
    assert (first.path, first.file_type, first.format) == ("a", "json", "alpaca")
    assert (second.path, second.file_type, second.format) == ("b", "json", "text")
    assert second.columns is not None
    assert second.columns.text == "body"


def test_number_that_yaml_reads_as_text_is_accepted():
    assert only({"train": {"learning_rate": "2e-4"}}).train.learning_rate == 2e-4


def test_run_overrides_single_keys_and_keeps_the_shared_ones():
    document = {
        "lora": {"r": 8, "alpha": 11.0},
        "runs": {"small": {"lora": {"r": 3}}, "shared": None},
    }
    runs = load_config(document)[1]
    assert [(run.lora.r, run.lora.alpha) for run in runs.values()] == [(3, 11.0), (8, 11.0)]


def test_run_can_set_a_shared_value_to_null():
    run = only({"train": {"epochs": 2}, "runs": {"a": {"train": {"epochs": None, "max_steps": 5}}}})
    assert (run.train.epochs, run.train.max_steps) == (None, 5)


def test_merge_replaces_lists_and_leaves_its_inputs_alone():
    base = {"a": {"list": [1, 2], "kept": 1}}
    override = {"a": {"list": [3]}}
    assert merge(base, override) == {"a": {"list": [3], "kept": 1}}
    assert (base, override) == ({"a": {"list": [1, 2], "kept": 1}}, {"a": {"list": [3]}})


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
def test_hub_id_is_owner_and_name(source, is_id):
    assert is_hub_id(source) is is_id


def test_existing_folder_of_two_parts_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("owner/name")


def test_keys_of_the_users_own_are_ignored_at_the_top_level_alone():
    _, runs = load_config({"x-fast": {"anything": 1}, "runs": {"a": {}}})
    assert runs == {"a": RunConfig()}
    for document in ({"train": {"x-fast": 1}}, {"runs": {"a": {"x-fast": 1}}}):
        with pytest.raises(UserError, match="x-fast: there is no such key"):
            load_config(document)


def test_base_in_a_folder_has_the_id_that_it_is_given():
    document = {"model": {"source": "workflow/resources/base"}, "export": {"base_id": "acme/tiny"}}
    assert load_config(document)[1]["first"].base_id == "acme/tiny"
    assert load_config({"model": {"source": "acme/tiny"}})[1]["first"].base_id == "acme/tiny"
    assert load_config({"model": {"source": "./tiny"}})[1]["first"].base_id is None


def test_base_of_the_hub_has_no_second_id():
    document = {"model": {"source": "acme/tiny"}, "export": {"base_id": "acme/other"}}
    with pytest.raises(UserError, match=r"export\.base_id = acme/other: the base is of the hub"):
        load_config(document)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"evaluate": {"require": {"t/acc": 5.0}}}, "no model can gain more than 1 by acc"),
        ({"evaluate": {"require": {"t/bleu,strict": 200.0}}}, "more than 100 by bleu"),
        ({"evaluate": {"require": {"heldout_loss": 500.0}}}, "more than 20 by heldout_loss"),
        ({"evaluate": {"require": {"other_text_loss": 21.0}}}, "more than 20 by other_text_loss"),
        (
            {"evaluate": {"forgetting": False, "require": {"other_text_loss": -0.1}}},
            "require = other_text_loss: it is not measured (forgetting = False)",
        ),
        (
            {
                "data": {"train": "chats.jsonl"},
                "evaluate": {"require": {"heldout_loss/general": -0.1}},
            },
            "heldout_loss/general: no such source is held out. Name one of heldout_loss/chats",
        ),
        ({"evaluate": {"require": {"reward_accuracy": 60.0}}}, "a share is at most 1"),
        ({"evaluate": {"require": {"reward": 0.6}}}, "evaluate.require names reward. No function"),
        (
            {"evaluate": {"require": {"rewards": 0.6}}},
            "heldout_loss, other_text_loss, reward_accuracy, reward_margin, reward or",
        ),
        (
            {"evaluate": {"require": {"reward_margin": 0.1}}},
            "reward_margin: train.objective = sft trains no preferences",
        ),
        (
            {
                "train": {"objective": "dpo"},
                "evaluate": {"heldout": False, "require": {"reward_accuracy": 0.6}},
            },
            "require = reward_accuracy: it is not measured (heldout = False)",
        ),
        ({"data": {"train": [{"path": "a", "weight": 1e-300}]}}, "must be at least 1e-06"),
        ({"data": {"heldout": None, "heldout_share": 1e-300}}, "must be at least 1e-06"),
        ({"data": {"columns": {"prompt": "a", "completion": "a"}}}, "prompt is read from this"),
        ({"data": {"columns": {"output": "instruction"}}}, "instruction is read from this"),
        ({"data": {"columns": {"labels": "input_ids"}}}, "input_ids is read from this"),
    ],
)
def test_what_could_never_work_is_refused_with_the_settings(document, said):
    with pytest.raises(UserError) as refusal:
        load_config(document)
    assert said in str(refusal.value)


def test_rewards_may_be_required_of_the_runs_that_train_preferences():
    dpo = {"train": {"objective": "dpo"}, "evaluate": {"require": {"reward_accuracy": 0.6}}}
    _, runs = load_config({"runs": {"sft": {}, "dpo": dpo}})
    assert runs["dpo"].evaluate.require == {"reward_accuracy": 0.6}


def test_roles_of_different_formats_may_share_a_column():
    load_config({"data": {"columns": {"prompt": "text", "instruction": "text"}}})

"""Datasets of other trainers as settings of `data`."""

import json

import pytest

from tests.importing.test_rules import QLORA, imported, run_of
from workflow.importing.draft import label
from workflow.importing.reading import Source
from workflow.importing.rules import translate
from workflow.scripts.import_config import by_reason


def data_of(*entries, **keys):
    return run_of(imported(QLORA | {"datasets": list(entries)} | keys)).data


def test_one_dataset_of_the_hub_is_the_source_and_a_glob():
    entry = {"path": "owner/rows", "split": "train[:25%]", "type": "chat_template"}
    data = data_of(entry | {"field_messages": "turns"})
    (source,) = data.train_sources
    assert (data.source, source.path, source.weight) == ("owner/rows", "**/*train*", 0.25)
    assert (source.format, source.columns.messages) == ("messages", "turns")


def test_datasets_of_two_repositories_become_folders_with_the_command_that_fills_them():
    entries = [{"path": "one/a", "type": "alpaca"}, {"path": "two/b", "data_files": "x.json"}]
    draft = imported(QLORA | {"datasets": entries})
    data = run_of(draft).data
    assert data.source is None
    assert [source.path for source in data.train_sources] == ["data/a/**/*train*", "data/b/x.json"]
    assert any("hf download two/b" in why for why in by_reason(draft, "changed"))


def test_files_here_and_a_test_set_stay_paths():
    entry = {"path": "json", "data_files": ["a.json", "b.json"], "type": "alpaca"}
    data = data_of(entry, test_datasets=[{"path": "data/held.jsonl", "type": "alpaca"}])
    assert [source.path for source in data.train_sources] == ["a.json", "b.json"]
    assert [source.path for source in data.heldout_sources] == ["data/held.jsonl"]


def test_columns_of_pairs_are_those_of_the_dataset():
    entry = {"path": "rows.jsonl", "type": "chat_template.default", "field_messages": "turns"}
    data = data_of(entry | {"field_chosen": "good"}, rl="dpo")
    assert (data.columns.prompt, data.columns.chosen) == ("turns", "good")


def test_keys_of_a_dataset_that_are_left_out_are_told_of():
    draft = imported(QLORA | {"datasets": [{"path": "a.jsonl", "type": "x.y", "oddity": 1}]})
    unknown = by_reason(draft, "unknown")
    assert [key for keys in unknown.values() for key in keys] == ["datasets.oddity"]
    assert any("datasets.type" in keys for keys in by_reason(draft, "changed").values())


def test_a_file_without_data_is_told_where_to_put_them():
    draft = imported(QLORA | {"datasets": None})
    assert run_of(draft).data.train == "data/train.jsonl"
    assert any("names no dataset" in why for why in by_reason(draft, "by default"))


def test_dataset_info_of_llama_factory_gives_files_and_columns(tmp_path):
    info = {"mine": {"file_name": "m.json", "columns": {"prompt": "ask", "response": "say"}}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    keys = {"model_name_or_path": "owner/model", "stage": "sft", "dataset": "mine"}
    source = Source(tmp_path / "config.yaml", "llama_factory", keys)
    data = run_of(translate(source, gpus=1)).data
    assert data.train == str(tmp_path / "data" / "m.json")
    assert (data.columns.instruction, data.columns.output) == ("ask", "say")


@pytest.mark.parametrize(
    ("name", "plain"), [("owner/a b", "a-b"), ("./.hidden", "hidden"), ("///", "imported")]
)
def test_label_is_a_name_of_settings(name, plain):
    assert label(name) == plain

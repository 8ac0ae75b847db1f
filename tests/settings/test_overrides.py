"""Settings above `runs:` and the runs that override them; what has no default."""

import pytest

from tests.support.settings_examples import only
from workflow.lib.settings.config import check_sources, ineffective_settings, load_config
from workflow.lib.system.errors import UserError

EPOCHS, STEPS = {"epochs": 2.0}, {"max_steps": 7}


def test_steps_alone_set_the_length():
    train = only({"train": STEPS}).train
    assert (train.epochs, train.max_steps) == (None, 7)


@pytest.mark.parametrize(("shared", "own"), [(EPOCHS, STEPS), (STEPS, EPOCHS)])
def test_length_of_a_run_takes_the_place_of_the_shared_one(shared, own):
    document = {"train": {"seed": 3, **shared}, "runs": {"a": {"train": own}, "b": {}}}
    runs = load_config(document)[1]
    assert runs["a"].train == only({"train": {"seed": 3, **own}}).train
    assert runs["b"].train == only({"train": {"seed": 3, **shared}}).train


@pytest.mark.parametrize(
    ("document", "settings"),
    [
        ({"train": EPOCHS, "runs": {"a": {"train": STEPS}}}, ["train.epochs"]),
        ({"lora": {"r": 4, "alpha": 8}, "runs": {"a": {"lora": {"r": 8}}}}, ["lora.r"]),
        ({"lora": {"r": 4}, "runs": {"a": {"lora": {"r": 8}}, "b": {}}}, []),
        ({"lora": {"r": 4}, "runs": {"a": None}}, []),
        ({"lora": {"r": 4}}, []),
    ],
)
def test_setting_that_every_run_overrides_is_named(document, settings):
    assert ineffective_settings(document) == settings


@pytest.mark.parametrize(
    ("document", "missing"),
    [
        ({}, "model.source and data.train must be set (run first)"),
        ({"model": {"source": "owner/name"}}, "data.train must be set (run first)"),
        (
            {"data": {"train": "a.jsonl"}, "runs": {"x": {"model": {"source": "a/b"}}, "y": {}}},
            "model.source must be set (run y)",
        ),
    ],
)
def test_model_and_data_have_no_default(document, missing):
    with pytest.raises(UserError) as refusal:
        check_sources(load_config(document)[1])
    headline, *lines = str(refusal.value).splitlines()
    assert headline == f"{missing}. The least config file is"
    assert "  train: data/chats.jsonl   # a file, folder or glob" in lines


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"model": {"source": "meta-llama/Llama-3.1-8B"}}, "Llama-3.1-8B"),
        ({"model": {"source": "/data/my models/"}}, "my-models"),
        ({"data": {"train": "chats/mine.v2.jsonl.gz"}}, "mine.v2"),
        ({"data": {"train": ["notes/*.txt", "b.csv"]}}, "notes"),
        ({"data": {"train": {"path": "../.."}}}, "data"),
        ({"data": {"source": "owner/set", "train": "a.json"}}, "set"),
        ({"data": {"train": "a.json", "name": "mine"}}, "mine"),
    ],
)
def test_names_are_those_of_source_and_file(section, name):
    ((key, _),) = section.items()
    assert getattr(only(section), key).name == name

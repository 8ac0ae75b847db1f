"""Settings of objectives: what each one reads, and what is refused."""

from typing import Any, get_args

import pytest

from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.settings.objectives import (
    DistillConfig,
    GrpoConfig,
    ObjectiveName,
    PreferencesConfig,
    needs_of,
    readers_of,
)
from workflow.lib.system.errors import UserError

SETTINGS = [
    *(f"preferences.{key}" for key in PreferencesConfig.model_fields),
    *(f"distill.{key}" for key in DistillConfig.model_fields),
    *(f"grpo.{key}" for key in GrpoConfig.model_fields),
]


def loaded(runs: dict[str, Any], **shared: Any) -> dict[str, RunConfig]:
    return load_config({**shared, "runs": runs})[1]


def test_every_setting_has_an_objective_that_reads_it_and_is_one() -> None:
    assert all(readers_of(setting) for setting in SETTINGS)
    named = {setting for name in get_args(ObjectiveName) for setting in needs_of(name).settings}
    assert named <= set(SETTINGS)


def test_whoever_reads_scores_names_the_model() -> None:
    for name in get_args(ObjectiveName):
        needs = needs_of(name)
        named = {"preferences.reference", "distill.teacher", "grpo.kl_reference"}
        scored = named & set(needs.settings)
        assert scored == ({needs.scores_of} if needs.scores_of else set()), name


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"train": {"objective": "dpo"}, "preferences": {"gamma": 1}},
            "preferences.gamma = 1.0: no run (dpo) reads it. Remove it, or set train.objective to "
            "simpo.",
        ),
        (
            {"runs": {"a": {"train": {"objective": "kto"}, "distill": {"top_k": 8}}}},
            "runs.a.distill.top_k = 8: train.objective = kto does not read it. Remove it, or set "
            "train.objective to distill.",
        ),
        (
            {"runs": {"a": {"preferences": {"beta": 0.2}}, "b": {"train": {"objective": "dpo"}}}},
            "runs.a.preferences.beta = 0.2: train.objective = sft does not read it.",
        ),
        (
            {"train": {"objective": "dpo"}, "preferences": {"loss_type": "exo_pair"}},
            "label_smoothing = 0.0: loss_type = exo_pair takes its logarithm. Set it above 0",
        ),
        (
            {
                "train": {"objective": "dpo"},
                "preferences": {"loss_type": "hinge", "label_smoothing": 0.1},
            },
            "label_smoothing = 0.1: loss_type = hinge has none. Set it to 0",
        ),
        (
            {"train": {"objective": "dpo"}, "preferences": {"label_smoothing": 0.5}},
            "preferences.label_smoothing = 0.5: must be below 0.5.",
        ),
        (
            {"train": {"objective": "dpo"}, "preferences": {"beta": 0}},
            "preferences.beta = 0: must be above 0.",
        ),
        (
            {"train": {"objective": "dpo"}, "preferences": {"loss_type": "aot"}},
            "preferences.loss_type = 'aot': must be 'sigmoid'",
        ),
        ({"train": {"objective": "ppo"}}, "train.objective = 'ppo': must be 'sft'"),
        (
            {"train": {"objective": "grpo"}, "grpo": {"kl_reference": "original"}},
            "kl_reference = original: with kl = 0.0 it has no effect. Raise kl, or set it to start",
        ),
        (
            {
                "train": {"objective": "kto"},
                "preferences": {"desirable_weight": 0, "undesirable_weight": 0},
            },
            "nothing would be trained. Set one above 0",
        ),
        (
            {"train": {"objective": "distill"}, "distill": {"temperature": 0}},
            "distill.temperature = 0: must be at least 0.01.",
        ),
    ],
)
def test_what_no_objective_takes_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config({"runs": {"a": {}}, **document})
    assert said in str(raised.value)


def test_shared_settings_reach_the_runs_whose_objective_reads_them_and_no_other() -> None:
    runs = loaded(
        {"first": {}, "second": {"train": {"objective": "dpo"}}}, preferences={"beta": 0.3}
    )
    assert runs["second"].preferences.beta == 0.3
    assert runs["first"] == loaded({"first": {}})["first"]


def test_shared_settings_of_grpo_reach_no_other_run() -> None:
    rewards = {"functions": {"short": {"function": "length"}}}
    runs = {"first": {}, "second": {"train": {"objective": "grpo"}, "rewards": rewards}}
    both = loaded(runs, grpo={"kl": 0.1})
    assert both["second"].grpo.kl == 0.1
    assert both["first"] == loaded({"first": {}})["first"]


def test_answers_are_not_divided_by_a_source_of_its_own_either() -> None:
    source = {"train": {"path": "a.jsonl", "overlong": "split"}}
    with pytest.raises(UserError, match=r"data\.overlong = split: train.objective = dpo"):
        loaded({"a": {"data": source}}, train={"objective": "dpo"})


@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize(("key", "value"), [("loss_on", "all"), ("overlong", "split")])
def test_answers_are_not_trained_with_their_prompts_or_divided(objective, key, value) -> None:
    train = {"objective": objective}
    with pytest.raises(UserError, match=rf"data\.{key} = {value}: train.objective = {objective}"):
        loaded({"a": {"data": {key: value}}}, train=train)
    loaded({"a": {"data": {key: value}, "train": {"objective": "sft"}}}, train=train)

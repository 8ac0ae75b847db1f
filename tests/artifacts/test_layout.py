"""Folders, keys and what each stage reads: what must and must not make a stage run again."""

from pathlib import Path
from typing import Any, get_args

import pytest

from workflow.lib.artifacts.layout import (
    answers_key,
    base_dir,
    base_key,
    calibration_text,
    calibration_tokens,
    checkpoint_dir,
    data_files,
    dataset_dir,
    dataset_key,
    earlier_rewards,
    fingerprint,
    first_rewards,
    free_report_settings,
    free_settings,
    model_dir,
    model_key,
    next_rounds,
    report_settings,
    rewards_file,
    rewards_key,
    sensitivity_path,
    settings_path,
    stage_settings,
    start_adapter,
    token_arrays,
    tokens_dir,
    tokens_key,
)
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.settings.config import (
    HardwareConfig,
    LoraSettings,
    QuantizeConfig,
    ReportConfig,
    RunConfig,
    Section,
    load_config,
)
from workflow.lib.settings.overrides import merge
from workflow.lib.settings.section_base import Stage

ROOT = Path(__file__).resolve().parents[2]
STAGES = [stage for stage in get_args(Stage) if stage != "render_report"]

KEYS = {
    "model": model_key,
    "dataset": dataset_key,
    "tokens": tokens_key,
    "base": base_key,
    "fingerprint": fingerprint,
}
HUB_DATA = {"source": "owner/data", "train": "train.jsonl", "heldout": None}


def run_with(section=None, **changes):
    document: dict[str, Any] = {"model": {"source": "owner/name"}, "data": HUB_DATA}
    (run,) = load_config(merge(document, {section: changes} if section else {}))[1].values()
    return run


@pytest.mark.parametrize(
    ("section", "change", "changed"),
    [
        ("model", {"source": "owner/other"}, {"model", "tokens", "base", "fingerprint"}),
        ("model", {"revision": "v2"}, {"model", "tokens", "base", "fingerprint"}),
        ("model", {"compute_dtype": "float32"}, {"fingerprint"}),
        ("model", {"attention": "eager"}, {"fingerprint"}),
        ("model", {"name": "label"}, set()),
        ("data", {"source": "owner/other"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"revision": "v2"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"train": "other.jsonl"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"heldout": "test.jsonl"}, {"dataset", "tokens", "fingerprint"}),
        ("data", {"train": {"path": "train.jsonl", "weight": 2.0}}, {"tokens", "fingerprint"}),
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
        ("train", {"objective": "dpo"}, {"tokens", "fingerprint"}),
        ("train", {"objective": "distill"}, {"fingerprint"}),
        ("hardware", {"gpus": 0, "cpu_processes": 3}, set()),
        ("hardware", {"offload_layers": 2}, set()),
        ("tracking", {"wandb_project": "mine"}, set()),
        ("export", {"merged": True}, set()),
        ("export", {"steps": [3]}, set()),
        ("evaluate", {"samples": 3}, set()),
    ],
)
def test_setting_changes_exactly_the_keys_of_what_depends_on_it(section, change, changed):
    before, after = run_with(), run_with(section, **change)
    assert {name for name, key in KEYS.items() if key(before) != key(after)} == changed


def changed_value(section, key):
    """Return another value of a setting, which need not be a valid one."""
    default = getattr(section, key)
    if key == "objective":
        return "dpo"
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, Section):
        inner = next(iter(type(default).model_fields))
        return default.model_copy(update={inner: "other"})
    return {"other": 1.0} if isinstance(default, dict) else ("other",)


# Settings that give a property the value that another one needs.
GIVES = {"reads_text": {"keep": "auto"}}


def edited(name, key):
    """Return a run before and after an edit of one setting; what it needs is there in both."""
    section = getattr(RunConfig(), name)
    if needs := section.affected_by(key).needs:
        section = section.model_copy(update=GIVES.get(needs[0], {needs[0]: needs[1]}))
    other = section.model_copy(update={key: changed_value(section, key)})
    before, after = (RunConfig().model_copy(update={name: each}) for each in (section, other))
    return before, after


SECTIONS: dict[str, type[Section]] = {
    name: type(getattr(RunConfig(), name)) for name in RunConfig.model_fields
}
SETTINGS = [(name, key) for name, section in SECTIONS.items() for key in section.model_fields]

# Stated here again, not taken from the code under test.
WITHOUT_EFFECT = {
    *(("train", key) for key in ("checkpoint_every_steps", "checkpoint_every_minutes")),
    *(("train", key) for key in ("grace_seconds", "hang_seconds", "log_every_steps")),
    *(("evaluate", key) for key in ("batch_size", "processes", "shard")),
    *(("tracking", key) for key in SECTIONS["tracking"].model_fields),
    ("train", "max_matmul_loss_rise"),
    ("data", "max_rejected_share"),
}
OF_THE_PLAN = {
    *(("train", key) for key in ("micro_batch_size", "activation_checkpointing", "keep_attention")),
    *(("hardware", key) for key in SECTIONS["hardware"].model_fields),
    ("train", "keep_checkpoints"),
    ("export", "steps"),
}


def test_every_setting_says_what_it_affects_and_who_reads_it():
    silent = [
        f"{name}.{key}"
        for name, section in {**SECTIONS, "report": ReportConfig}.items()
        for key in section.model_fields
        if section.affected_by(key).effect is None or not section.affected_by(key).stages
    ]
    assert silent == []
    said = {place: SECTIONS[place[0]].affected_by(place[1]).effect for place in SETTINGS}
    assert {place for place, effect in said.items() if effect == "none"} == WITHOUT_EFFECT
    assert {place for place, effect in said.items() if effect == "plan"} == OF_THE_PLAN


@pytest.mark.parametrize(
    ("objective", "examples"),
    [("sft", None), ("distill", None), ("dpo", "pairs"), ("orpo", "pairs"), ("kto", "rated")],
)
def test_tokens_are_told_which_examples_an_objective_needs(objective, examples):
    settings = stage_settings("tokenize_dataset", run_with("train", objective=objective))
    assert settings.get("examples") == examples


def test_evaluation_depends_on_the_models_that_it_measures_and_not_on_why():
    plain = run_with()
    named = run_with("evaluate", subjects=["tuned", "base", "original"], served="tuned")
    assert stage_settings("evaluate_run", plain) == stage_settings("evaluate_run", named)
    merged = run_with("export", merged=True)
    assert stage_settings("evaluate_run", merged)["evaluate"]["served"] == "merged"


def test_objectives_of_the_same_examples_share_tokens():
    keys = {o: tokens_key(run_with("train", objective=o)) for o in ("sft", "dpo", "ipo", "kto")}
    assert keys["dpo"] == keys["ipo"]
    assert len({*keys.values()}) == 3


# What follows from other settings: which examples there are, and which models are measured.
FOLLOWS = {
    ("train", "objective"): {"tokenize_dataset", "pack_answers", "evaluate_run"},
    ("train", "start_from"): {"evaluate_run"},
    ("preferences", "reference"): {"evaluate_run"},
    ("export", "merged"): {"evaluate_run", "check_served"},
    ("export", "w4a16"): {"evaluate_run", "check_served"},
    ("export", "serve"): {"evaluate_run", "check_served"},
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_editing_a_setting_reruns_exactly_the_stages_that_it_names():
    wrong = []

    def settings(run):
        return {s: (stage_settings(s, run), free_settings(s, run)) for s in STAGES}

    default = settings(RunConfig())
    for place in SETTINGS:
        before, after = edited(*place)
        affects = SECTIONS[place[0]].affected_by(place[1])
        readers = {stage for stage in STAGES if affects.read_by(stage)}
        reruns = {stage for stage in readers if affects.reruns(stage)}
        then, now = default if before == RunConfig() else settings(before), settings(after)
        changed, free = ({s for s in STAGES if then[s][n] != now[s][n]} for n in (0, 1))
        follows = FOLLOWS.get(place, set())
        if changed - follows != reruns - follows or free != readers - reruns:
            wrong.append((place, reruns, changed, free))
    assert wrong == []


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_checkpoints_continue_unless_an_edit_trains_again():
    """A setting that reruns the training, or makes its tokens or base anew, begins a trajectory."""
    changed, trains = set(), set()
    for name, key in SETTINGS:
        before, after = edited(name, key)
        if fingerprint(before) != fingerprint(after):
            changed.add((name, key))
        affects = SECTIONS[name].affected_by(key)
        if any(map(affects.reruns, ("tokenize_dataset", "quantize_base", "finetune"))):
            trains.add((name, key))
    label = {("model", "name")}
    of_identity = {("model", "source"), ("model", "revision")}
    sampled = {("rewards", "functions")}  # with them a run trains on sampled answers
    assert changed == trains - label | of_identity | sampled


def test_setting_without_what_it_needs_affects_nothing():
    plain = run_with("train", matmul_passes="both")
    assert fingerprint(plain) == fingerprint(run_with("train", matmul_passes="backward"))


@pytest.mark.parametrize("stage", STAGES)
def test_file_of_settings_does_not_depend_on_the_order_of_keys(stage):
    def reordered(value):
        if not isinstance(value, dict):
            return value
        return {key: reordered(value[key]) for key in reversed(value)}

    document = run_with("train", seed=3).model_dump(mode="json")
    assert list(reordered(document)) != list(document)
    paths = {
        settings_path(stage, "demo", stage_settings(stage, RunConfig.model_validate(one)))
        for one in (document, reordered(document))
    }
    assert len(paths) == 1


@pytest.mark.parametrize("stage", [x for x in STAGES if x not in ("evaluate_run", "check_served")])
def test_settings_of_a_stage_load_back_to_its_sections(stage):
    run = run_with()
    settings = stage_settings(stage, run)
    loaded = {name: getattr(run, name).model_validate(value) for name, value in settings.items()}
    assert stage_settings(stage, run.model_copy(update=loaded)) == settings


def test_base_depends_on_tokens_only_if_they_calibrate():
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


def test_base_waits_for_tokens_where_the_model_decides_whether_they_calibrate():
    """What a hub model is like is not known while the workflow is parsed."""
    chosen, other_rows = (
        RunConfig.model_validate({"data": {"seq_len": n}, "quantize": {"method": "auto"}})
        for n in (61, 67)
    )
    assert calibration_tokens(chosen)[0] == f"{tokens_dir(chosen)}/manifest.json"
    assert base_dir(chosen) != base_dir(other_rows)
    on_gpus = chosen.model_copy(update={"hardware": HardwareConfig(gpus=2)})
    assert base_dir(chosen) == base_dir(on_gpus)


def test_base_of_decided_bits_depends_on_the_plan_and_checkpoints_on_its_content_alone():
    """Another number of GPUs decides again; where the same linears stay, the training resumes."""
    auto = QuantizeConfig(keep="auto")
    runs = [
        RunConfig(quantize=auto, hardware=HardwareConfig(gpus=gpus), lora=LoraSettings(r=rank))
        for gpus, rank in ((1, 16), (2, 16), (1, 8))
    ]
    assert len({base_key(run) for run in runs}) == 3
    assert len({sensitivity_path(run) for run in runs}) == 1
    assert len({fingerprint(run) for run in runs}) == 2, "the rank is part of the training"
    plain = [run.model_copy(update={"quantize": QuantizeConfig()}) for run in runs]
    assert len({base_key(run) for run in plain}) == 1


def test_text_that_calibrates_is_an_input():
    for method, text in (("calibrated", "mine.txt"), ("absmax", None)):
        settings = {"method": method, "calibration_text": "mine.txt"}
        assert calibration_text(RunConfig.model_validate({"quantize": settings})) == text


STEADY = {"lr_schedule": "constant", "warmup_share": 0.0}


@pytest.mark.parametrize(
    ("changes", "continues"),
    [
        ({}, True),
        ({"lr_schedule": "cosine"}, False),
        ({"warmup_share": 0.1}, False),
        ({"warmup_share": 0.03, "warmup_steps": 4}, True),
        ({"select": "best", "evaluate_every_steps": 5}, False),
        ({"early_stopping_patience": 2, "evaluate_every_steps": 5}, False),
    ],
)
def test_run_with_more_steps_has_the_checkpoints_of_a_shorter_one_with_the_same_steps(
    changes, continues
):
    shorter, longer = (run_with("train", epochs=n, **STEADY | changes) for n in (1.0, 2.0))
    folders = {checkpoint_dir("same", run) for run in (shorter, longer)}
    assert (len(folders) == 1) is continues
    assert fingerprint(shorter) != fingerprint(longer), "what is made of the two is not the same"


def test_hub_sources_get_folders_with_label_and_key():
    run = run_with()
    assert model_dir(run) == f"results/hub/model/{run.model.name}-{model_key(run)}"
    assert dataset_dir(run) == f"results/hub/dataset/{run.data.name}-{dataset_key(run)}"
    assert data_files(run) == [dataset_dir(run)]


def test_report_receives_the_settings_that_make_the_same_runs_again():
    document = {
        "lora": {"dropout": 0.0},
        "runs": {"a": {"lora": {"r": 4}}, "b": {"train": {"seed": 7}}},
    }
    report, runs = load_config(document)
    received = merge(report_settings(report, runs), free_report_settings(runs))
    assert received["runs"] == {"a": {"lora": {"r": 4}}, "b": {"train": {"seed": 7}}}
    assert load_config(received) == (report, runs)


def rounds(**changes):
    """Return the keys of answers, rewards and tokens of three rounds of best answers."""
    document = {
        "model": {"source": "owner/name"},
        "data": HUB_DATA,
        "answers": {"max_new_tokens": 64},
        "runs": {"r": {"rounds": 3, "rewards": {"functions": {"a": {"function": "length"}}}}},
    }
    runs = with_starts(load_config(merge(document, changes))[1])
    return [(answers_key(run), rewards_key(run), tokens_key(run)) for run in runs.values()]


def changed_rounds(**changes):
    """Return by round which keys of answers, rewards and tokens changes make others."""
    pairs = zip(rounds(), rounds(**changes), strict=True)
    return [[a != b for a, b in zip(*round_keys, strict=True)] for round_keys in pairs]


ALL, NONE = [True] * 3, [False] * 3


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"train": {"learning_rate": 0.5}}, NONE),
        ({"answers": {"temperature": 0.5}}, ALL),
        ({"runs": {"r": {"rewards": {"functions": {"a": {"weight": 2.0}}}}}}, [False, True, True]),
        ({"runs": {"r": {"rewards": {"stop_after_equal": 2}}}}, [False, False, True]),
        ({"data": {"seed": 1}}, ALL),
    ],
    ids=["learning rate", "temperature", "reward", "packing", "prompts"],
)
def test_later_rounds_follow_every_edit_and_the_first_its_own_stages(changes, first):
    assert changed_rounds(**changes) == [first, ALL, ALL]


def test_no_edit_of_evaluation_or_number_of_rounds_changes_a_round():
    assert changed_rounds(evaluate={"samples": 1}) == [NONE] * 3
    more = {"runs": {"r": {"rounds": 5}}}
    assert rounds(**more)[:3] == rounds()


def test_first_round_and_the_rounds_before_are_those_of_the_chain():
    document = {
        "data": HUB_DATA,
        "answers": {"max_new_tokens": 64},
        "rewards": {"functions": {"a": {"function": "length"}}, "stop_after_equal": 3},
        "runs": {"r": {"rounds": 4}},
    }
    runs = with_starts(load_config(document)[1])
    files = [rewards_file(run) for run in runs.values()]
    assert [first_rewards(run) for run in runs.values()] == [[], *([files[0]] for _ in range(3))]
    after = next_rounds(runs)
    assert [after[name] for name in ("r-1", "r-2", "r-3")] == [*runs.values()][1:]
    last = after["r-4"]
    assert last.answers.prompts_per_round == 0
    assert start_adapter(last) == "results/runs/r-4/consolidate/adapter"
    assert first_rewards(last) == [files[0]]
    assert earlier_rewards(runs["r-4"]) == [files[2], files[1]]
    assert earlier_rewards(runs["r-2"]) == [files[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": {"heldout_prompts": 3}},
        {"rewards": {"functions": {"a": {"weight": 2.0}}}},
        {"data": {"heldout_share": 0.3}},
    ],
    ids=["prompts", "rewards", "rows"],
)
def test_rounds_that_measure_otherwise_are_not_compared_with_those_before(changes):
    later = {"train": {"start_from": "a"}, "answers": {"round": 2}}
    document = {
        "data": HUB_DATA,
        "answers": {"max_new_tokens": 64},
        "rewards": {"functions": {"a": {"function": "length"}}},
        "runs": {"a": {}, "same": later, "other": merge(later, changes)},
    }
    runs = with_starts(load_config(document)[1])
    after = next_rounds(runs)
    assert after["a"] is runs["same"]
    assert [first_rewards(run) for run in runs.values()] == [[], [rewards_file(runs["a"])], []]
    assert first_rewards(after["other"]) == [rewards_file(runs["other"])]


@pytest.mark.parametrize(
    "changes", [{"quantize": {"block_size": 128}}, {"model": {"attention": "eager"}}]
)
def test_answers_of_vllm_do_not_depend_on_the_base_of_the_training(changes):
    assert changed_rounds(**changes) == [ALL] * 3
    vllm = {"answers": {"sampler": "vllm"}}
    assert changed_rounds(**vllm) == [ALL] * 3
    first, *_ = rounds(**merge(vllm, changes))
    assert first[0] == rounds(**vllm)[0][0]

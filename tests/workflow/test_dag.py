"""What an edit runs again, and what it leaves alone: dry runs of the real Snakefile over a finished
project."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.support.preset_texts import preset
from tests.support.workflow_project import copy_of_repository, make_project, write_rows

REPORT = ["render_report"]
EVALUATION = ["evaluate_run", "write_card", *REPORT]
EXPORT = ["consolidate", *EVALUATION]
TRAINING = ["preflight_run", "finetune", *EXPORT]
EVERYTHING = ["describe_model", "tokenize_dataset", "quantize_base", *TRAINING]


@pytest.fixture
def project(finished_project, tmp_path):
    return finished_project.copy(tmp_path / "project")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A project in which nothing has run."""
    return make_project(tmp_path_factory.mktemp("workflow") / "fresh")


def once(rules):
    return dict.fromkeys(rules, 1)


# One of each kind: what each setting reruns is in tests/artifacts.
EDITS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("merged model", {"export": {"merged": True}}, ["consolidate_and_merged", *EVALUATION]),
    (
        "merged model in 4 bits",
        {"export": {"merged": True, "w4a16": True}},
        ["consolidate_and_merged", "convert_merged", *EVALUATION],
    ),
    ("subjects written out", {"evaluate": {"subjects": ["tuned", "base", "original"]}}, REPORT),
    ("adapters of steps", {"export": {"steps": [3]}}, ["preflight_run", "export_step", *REPORT]),
    ("calibration", {"quantize": {"method": "calibrated"}}, ["quantize_base", *TRAINING]),
    ("row length", {"data": {"seq_len": 29}}, ["tokenize_dataset", *TRAINING]),
    (
        "what changes nothing",
        {
            "data": {"max_rejected_share": 0.5},
            "train": {"checkpoint_every_minutes": None, "log_every_steps": 2, "hang_seconds": 77.0},
            "evaluate": {"batch_size": 3, "processes": 1, "shard": False},
            "lora": {"dropout": 0.0},
            "tracking": {"tensorboard": False},
        },
        [],
    ),
    (
        "what changes the prediction alone",
        {"train": {"micro_batch_size": 1, "keep_checkpoints": 1}},
        ["preflight_run", *REPORT],
    ),
    (
        "two edits at once",
        {"hardware": {"cpu_processes": 1}, "evaluate": {"samples": 1}},
        ["preflight_run", *EVALUATION],
    ),
    (
        "two settings that swap their values",
        {"hardware": {"cpu_processes": 1}, "train": {"adam_beta1": 0.999, "adam_beta2": 0.9}},
        TRAINING,
    ),
]


@pytest.mark.parametrize(("edit", "rules"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_edit_runs_the_stages_that_read_it_and_those_after_them(project, edit, rules):
    project.edit(edit)
    assert project.planned("all") == once(rules)


def test_run_waits_for_the_one_that_it_starts_from_and_follows_its_data(project):
    """Its own data are others, so that only the adapter tells of the first run's."""
    (project.root / "data" / "other.jsonl").write_bytes(
        (project.root / "data" / "train.jsonl").read_bytes()
    )
    runs = {
        "demo": {},
        "next": {"train": {"start_from": "demo"}, "data": {"train": "data/other.jsonl"}},
    }
    project.edit({"runs": runs})
    assert project.planned("all") == once(["tokenize_dataset", *TRAINING])
    change_training_rows(project)
    planned = project.planned("all")
    assert (planned["finetune"], planned["consolidate"], planned["tokenize_dataset"]) == (2, 2, 2)
    project.edit({"runs": {"demo": {"train": {"start_from": "next"}}}})
    refused = project.snakemake("all", "--dry-run").output
    assert "the runs start from each other: demo from next, next from demo" in refused


def test_bits_are_decided_before_the_base_and_once_for_a_chain(tmp_path):
    """Sensitivities, then preflight, then the base; a run that starts from another has its base."""
    edit = {
        "quantize": {"keep": "auto"},
        "hardware": {"gpus": 1, "gpu_model": "RTX 4090"},
        "runs": {"demo": {}, "next": {"train": {"start_from": "demo"}}, "r8": {"lora": {"r": 8}}},
    }
    project = make_project(tmp_path / "project")
    project.edit(edit)
    plan = project.plan("train")
    planned = {rule: len(jobs) for rule, jobs in plan.items()}
    assert planned["measure_sensitivity"] == 1
    assert (planned["quantize_base"], planned["preflight_run"], planned["finetune"]) == (2, 3, 3)
    reasons = {job.wildcards["run"]: job.reason for job in plan["preflight_run"]}
    assert all("results/sensitivities/" in reasons[run] for run in ("demo", "r8"))
    assert "results/base/" in reasons["next"]
    assert all("preflight.json" in job.reason for job in plan["quantize_base"])


def test_machine_without_gpus_measures_for_a_plan_of_others(tmp_path):
    hardware = {"gpus": 1, "gpu_model": "RTX 4090"}
    project = make_project(tmp_path, quantize={"keep": "auto"}, hardware=hardware)
    project.environment["CUDA_VISIBLE_DEVICES"] = ""
    project.run("preflight", "--until", "measure_sensitivity")
    assert list(tmp_path.glob("results/sensitivities/*.json"))


def test_adapter_of_a_checkpoint_is_exported_without_training_the_run_to_its_end(project):
    shutil.rmtree(project.folder("finetune"))
    assert project.planned("results/runs/demo/export_step/40") == once(["export_step"])
    project.edit({"export": {"steps": [40]}})
    expected = once(["finetune", "export_step"])
    assert project.planned("results/runs/demo/export_step/40") == expected


def test_reordered_keys_and_touched_inputs_run_nothing(project):
    for path in [*(project.root / "data").iterdir(), *(project.root / "model").iterdir()]:
        path.touch()
    settings = project.settings
    backwards = {
        section: dict(reversed(values.items())) for section, values in reversed(settings.items())
    }
    assert list(backwards["train"]) != list(settings["train"])
    project.write_settings(backwards)
    assert project.planned("all") == {}


def settings_files(project):
    files = (project.root / "results" / "settings").rglob("*.json")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_dry_run_with_other_settings_changes_no_file_of_a_running_workflow(project):
    """Nor does a second Snakemake: the jobs of the first read their settings when they start."""
    before, settings = settings_files(project), project.settings
    project.edit({"train": {"learning_rate": 0.5}, "evaluate": {"samples": 1, "processes": 1}})
    assert project.planned("all") == once(TRAINING)
    assert {path: settings_files(project)[path] for path in before} == before
    project.write_settings(settings)
    assert project.planned("all") == {}


def test_removed_files_of_settings_and_benchmarks_run_nothing(project):
    for folder in ("settings", "benchmarks"):
        shutil.rmtree(project.root / "results" / folder)
    assert project.planned("all") == {}


def change_training_rows(project):
    write_rows(project.root / "data" / "train.jsonl", first=7, rows=60)


def change_heldout_rows(project):
    write_rows(project.root / "data" / "heldout.jsonl", first=2000, rows=12)


def change_weights(project):
    weights = project.root / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def change_config(project):
    path = project.root / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


def change_chat_template(project):
    template = project.root / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")


CHANGED_FILES = [
    (change_training_rows, ["tokenize_dataset", *TRAINING]),
    (change_heldout_rows, ["tokenize_dataset", *TRAINING]),
    (change_weights, ["describe_model", "quantize_base", *TRAINING]),
    (change_config, ["describe_model", "quantize_base", *TRAINING]),
    (change_chat_template, EVERYTHING),  # the NF4 base carries the tokenizer
]


@pytest.mark.parametrize(
    ("change", "rules"), CHANGED_FILES, ids=[c[0].__name__ for c in CHANGED_FILES]
)
def test_changed_file_runs_the_stages_that_read_it(project, change, rules):
    change(project)
    assert project.planned("all") == once(rules)


def test_edit_in_two_invocations_trains_like_in_one(project):
    """`snakemake tokenize` after new rows leaves training for later; it must not be forgotten
    then."""
    change_training_rows(project)
    project.run("tokenize")
    assert project.planned("all") == once(TRAINING)


LOST: dict[str, tuple[str, list[str]]] = {
    "description": ("results/models/tiny-*", ["describe_model", "preflight_run", *REPORT]),
    "tokens": ("results/tokens/qa-*", ["tokenize_dataset", *TRAINING]),
    "base": ("results/base/tiny-*", ["quantize_base", "finetune", *EXPORT]),
    "preflight": ("results/runs/demo/preflight_run", ["preflight_run", *REPORT]),
    "training": ("results/runs/demo/finetune", ["finetune", *EXPORT]),
    "export": ("results/runs/demo/consolidate", EXPORT),
    "evaluation": ("results/runs/demo/evaluate_run", EVALUATION),
}


@pytest.mark.parametrize(("folder", "rules"), LOST.values(), ids=LOST)
def test_lost_artifact_is_made_again_though_what_was_made_from_it_is_there(project, folder, rules):
    """Snakemake itself removes the outputs of a job that failed."""
    (found,) = project.root.glob(folder)
    shutil.rmtree(found)
    assert project.planned("all") == once(rules)


def test_comments_in_code_and_another_checkout_run_nothing(finished_project, tmp_path):
    repository = copy_of_repository(tmp_path / "repository")
    sources = [
        repository / "workflow" / "lib" / "training" / "loop.py",
        repository / "workflow" / "scripts" / "finetune_worker.py",
        repository / "workflow" / "rules" / "finetune.smk",
    ]
    for path in sources:
        path.write_text(path.read_text() + "\n# A remark.\n")
    project = finished_project.copy(tmp_path / "project", repository=repository)
    assert project.planned("all") == {}


ODD_FOLDER = "a b'c\"d é $(exit 1)"


def test_checkout_in_a_folder_of_any_name_plans_everything(fresh, tmp_path):
    repository = copy_of_repository(tmp_path / ODD_FOLDER)
    project = fresh.copy(repository, repository=repository)
    assert project.planned("all") == once(EVERYTHING)


def test_settings_with_a_key_twice_are_refused_with_its_line(fresh, tmp_path):
    project = fresh.copy(tmp_path / "project")
    text = (project.root / "config.yaml").read_text()
    (project.root / "config.yaml").write_text(f"{text}train: {{max_steps: 72, epochs: null}}\n")
    done = project.snakemake("--dry-run", "all")
    assert done.status == 1
    line = len(text.splitlines()) + 1
    assert f"config.yaml, line {line}: the key train stands there for the second" in done.output


BEFORE_TRAINING = ["describe_model", "tokenize_dataset", "preflight_run"]
TRAINED = [*BEFORE_TRAINING, "quantize_base", "finetune", "consolidate"]
TARGETS = {
    ("tokenize",): BEFORE_TRAINING[:2],
    ("preflight",): BEFORE_TRAINING,
    ("train",): TRAINED,
    ("evaluate",): [*TRAINED, "evaluate_run", "write_card"],
    ("report",): EVERYTHING,
    ("all",): EVERYTHING,
    (): EVERYTHING,
}


@pytest.mark.parametrize(("target", "rules"), TARGETS.items(), ids=str)
def test_target_plans_what_it_needs(fresh, target, rules):
    assert fresh.planned(*target) == once(rules)


@pytest.mark.parametrize(("method", "is_beside"), [("absmax", True), ("calibrated", False)])
def test_stages_run_side_by_side_but_preflight_ends_before_a_long_quantization(
    fresh, tmp_path, method, is_beside
):
    project = fresh.copy(tmp_path / "project")
    plan = project.plan("train", "--cores", "4", "--config", f"quantize={{method: {method}}}")
    threads = {rule: jobs[0].threads for rule, jobs in plan.items()}
    assert threads["describe_model"] + threads["tokenize_dataset"] == 4
    assert (threads["preflight_run"] + threads["quantize_base"] <= 4) == is_beside


def test_a_gpu_quantizes_beside_description_and_tokenization(fresh, tmp_path):
    project = fresh.copy(tmp_path / "project")
    fake_driver = str(project.repository / "tests" / "fake_driver")
    driver = {"PYTHONPATH": fake_driver, "CUDA_VISIBLE_DEVICES": "1,3"}
    with_gpus = replace(project, environment=project.environment | driver)
    plan = with_gpus.plan("train", "--cores", "8", "--config", "hardware={gpus: auto}")
    first = ("describe_model", "tokenize_dataset", "quantize_base")
    assert [plan[rule][0].threads for rule in first] == [1, 3, 4]


def test_sweep_shares_tokens_and_base_where_their_settings_are_equal(fresh, tmp_path):
    sweep = fresh.copy(tmp_path / "sweep")
    sweep.edit(
        {"runs": {"demo": {}, "wide": {"lora": {"r": 8}}, "short": {"data": {"seq_len": 29}}}}
    )
    per_run = ["preflight_run", "finetune", "consolidate", "evaluate_run", "write_card"]
    shared = {"describe_model": 1, "tokenize_dataset": 2, "quantize_base": 1, "render_report": 1}
    assert sweep.planned("all") == shared | dict.fromkeys(per_run, 3)


def test_sweep_of_beta_scores_its_reference_once(fresh, tmp_path):
    sweep = fresh.copy(tmp_path / "sweep")
    dpo = {"train": {"objective": "dpo"}}
    runs = {"sft": {}, "start": dpo}
    runs |= {f"beta-{x}": dpo | {"preferences": {"reference": "sft", "beta": x}} for x in (1, 2)}
    runs["after"] = {"train": {"objective": "dpo", "start_from": "sft"}}
    sweep.write_settings(sweep.settings | {"runs": runs})
    planned = sweep.planned("train")
    assert (planned["score_tokens"], planned["finetune"]) == (1, 5)


def test_base_that_the_original_teaches_is_a_preset_of_runs_on_one_base(fresh, tmp_path):
    taught = fresh.copy(tmp_path / "taught")
    runs = yaml.safe_load(preset("recover-demo").read_text())["runs"]
    taught.write_settings(taught.settings | {"runs": runs})
    plan = taught.plan("train")
    assert {rule: len(plan[rule]) for rule in ("quantize_base", "score_tokens", "finetune")} == {
        "quantize_base": 1, "score_tokens": 1, "finetune": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("heldout", "times"), [(True, 1), (False, 0)])
def test_student_is_evaluated_by_the_scores_of_its_teacher(fresh, tmp_path, heldout, times):
    taught = fresh.copy(tmp_path / "taught")
    evaluate = taught.settings["evaluate"] | {"heldout": heldout}
    student = {"train": {"objective": "distill"}, "evaluate": evaluate}
    taught.write_settings(taught.settings | {"runs": {"plain": {}, "student": student}})
    said = taught.run("--dry-run", "--printshellcmds", "all").output
    commands = [line for line in said.splitlines() if "workflow.scripts.evaluate_run " in line]
    assert len(commands) == 2
    assert sum(" --scores results/scores/" in command for command in commands) == times


def test_new_run_leaves_finished_ones_alone(project):
    project.edit({"runs": {"wide": {"lora": {"r": 8}}}})
    plan = project.plan("all")
    runs = {
        job.wildcards["run"] for rule, jobs in plan.items() if rule not in REPORT for job in jobs
    }
    assert (sorted(plan), runs) == (sorted(TRAINING), {"wide"})

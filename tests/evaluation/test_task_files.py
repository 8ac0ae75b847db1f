"""What passes as free of code is what the installed harness has, and nothing that it looks up
elsewhere."""

import dataclasses
import inspect
import os

import lm_eval.api.metrics
import lm_eval.filters  # noqa: F401
import pytest
from lm_eval.api import registry, samplers
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.config.group import AggMetricConfig, GroupConfig
from lm_eval.config.task import FewshotConfig, TaskConfig

from workflow.lib.evaluation import task_files
from workflow.lib.evaluation.task_files import (
    check_tasks,
    environment,
    local_task_names,
    refuse_code,
)
from workflow.lib.settings.evaluate import EvaluateConfig
from workflow.lib.system.errors import UserError


@pytest.fixture
def tasks_dir(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "task: one\ntag: [both, few]\nprocess_docs: !function code.that_is_not_there\n"
    )
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.yaml").write_text("include: _shared.yaml\ntask: two\ntag: both\n")
    (tmp_path / "deep" / "_shared.yaml").write_text("output_type: multiple_choice\n")
    (tmp_path / "group.yaml").write_text("group: all_of_them\ntask: [one, elsewhere]\n")
    (tmp_path / "empty.yaml").write_text("")
    return str(tmp_path)


def test_names_are_those_of_tasks_tags_and_groups(tasks_dir):
    assert local_task_names(tasks_dir) == {"one", "two", "both", "few", "all_of_them"}


@pytest.mark.parametrize(
    ("tasks", "code", "offline"),
    [
        (("one", "both"), False, {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"}),
        (("one", "arc_easy"), False, {"HF_EVALUATE_OFFLINE"}),
        (("arc_easy",), True, set()),
    ],
    ids=["local tasks", "a task of the harness", "code is allowed"],
)
def test_network_is_for_tasks_of_the_harness_and_code_of_the_hub_is_asked_for(
    tasks_dir, tasks, code, offline
):
    settings = EvaluateConfig(tasks=tasks, tasks_dir=tasks_dir, task_code=code)
    variables = {name: value for name, value in environment(settings).items() if "OFFLINE" in name}
    assert variables.keys() - {"TRANSFORMERS_OFFLINE"} == offline
    assert {*variables.values()} <= {"1"}


def test_folder_that_is_not_there_is_refused(tmp_path):
    missing = str(tmp_path / "tasks")
    with pytest.raises(UserError, match=r"evaluate\.tasks_dir = .*there is no such folder"):
        local_task_names(missing)


def test_file_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [one\n")
    with pytest.raises(UserError, match=r"broken\.yaml: is no YAML that can be read"):
        local_task_names(str(tmp_path))


CODE = {
    "function": "process_docs: !function utils.run",
    "function below a list": "metric_list: [{metric: !function utils.run}]",
    "function in an inline task": "task: [{task: x, doc_to_text: !function utils.run}]",
    "class": "class: !function utils.Task",
    "python object": "description: !!python/object/apply:os.system [true]",
    "trusted data set": "dataset_kwargs: {trust_remote_code: true}",
    "metric that is a path": "metric_list: [{metric: tasks/mine}]",
    "metric of the hub": "metric_list: [{metric: rouge}]",
    "metric of the harness, from the hub": "metric_list: [{metric: f1, hf_evaluate: true}]",
    "metric of an inline task": "task: [{task: x, metric_list: [{metric: ./mine}]}]",
    "metric behind a merged key": "x-a: &a {metric_list: [{metric: ./mine}]}\n<<: *a",
    "aggregation": "metric_list: [{metric: acc, aggregation: os.system}]",
    "filter": "filter_list: [{name: a, filter: [{function: custom, filter_fn: os.system}]}]",
    "sampler": "fewshot_config: {sampler: mine.Sampler}",
    "output type": "output_type: mine.Request",
    "data set of one's own": "custom_dataset: mine.load",
    "reader that imports what its options name": "dataset_path: iceberg",
    "reader of pickles": "dataset_path: pandas",
    "prompt of a package": "use_prompt: 'promptsource:x'",
    "decoding of the hub": "generation_kwargs: {custom_generate: mine/decoding}",
    "results": "process_results: mine.results",
}


@pytest.mark.parametrize("line", CODE.values(), ids=CODE)
def test_task_file_that_may_run_code_is_refused(tmp_path, line):
    (tmp_path / "one.yaml").write_text(f"output_type: multiple_choice\n{line}\n")
    with pytest.raises(UserError, match=r"one\.yaml may run code \(.*evaluate\.task_code = false"):
        refuse_code(str(tmp_path))


def test_code_behind_an_included_file_of_any_name_is_found(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one\ninclude: [../shared]\n")
    (tmp_path / "shared").write_text("include: tasks/one.yaml\nprocess_docs: !function utils.run\n")
    with pytest.raises(UserError, match=r"shared may run code \(.*!function"):
        refuse_code(str(tmp_path / "tasks"))


NINES = "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9))


@pytest.mark.parametrize("text", ["task: &a [*a]\n", f"a0: &a0 x\n{NINES}\n"])
def test_aliases_without_end_are_refused_at_once(tmp_path, text):
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(UserError, match=r"one\.yaml: is no YAML that can be read"):
        local_task_names(str(tmp_path))


def test_pipe_in_a_task_file_s_place_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "one.yaml")
    with pytest.raises(UserError, match=r"one\.yaml: it is a pipe"):
        refuse_code(str(tmp_path))


@pytest.fixture
def measuring_dir(tmp_path):
    (tmp_path / "mc.yaml").write_text(
        "task: mc\ntag: quick\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (tmp_path / "number.yaml").write_text(
        "task: number\nmetric_list: [{metric: exact_match}]\nfilter_list: [{name: strict}]\n"
    )
    (tmp_path / "plain.yaml").write_text("task: plain\noutput_type: loglikelihood\n")
    (tmp_path / "inner.yaml").write_text("group: inner\ntask: [number, quick]\n")
    (tmp_path / "outer.yaml").write_text("group: outer\ntask: [inner]\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("tasks", "required"),
    [
        (["mc"], "mc/acc_norm"),
        (["number"], "number/exact_match,strict"),
        (["plain"], "plain/perplexity"),
        (["quick"], "mc/acc"),
        (["outer"], "number/exact_match,strict"),
        (["outer"], "mc/acc"),
        ([], "heldout_loss"),
    ],
)
def test_requirement_that_a_task_measures_is_accepted(measuring_dir, tasks, required):
    settings = EvaluateConfig(tasks=tasks, tasks_dir=measuring_dir, require={required: 0.1})
    check_tasks(settings)


@pytest.mark.parametrize(
    ("tasks", "required", "message"),
    [
        (["mc"], "mc/accuracy", "the task measures acc, acc_norm. Name one of these"),
        (["number"], "number/exact_match", "the task measures exact_match,strict"),
        (["mc"], "number/exact_match", "'number' is not among the tasks that are run (mc)"),
        (["quick"], "quick/acc", "'quick' is not among the tasks that are run (mc)"),
        (["quick"], "plain/acc", "'plain' is not among the tasks that are run (mc)"),
        ([], "mc/acc", "'mc' is not among the tasks that are run (none)"),
    ],
)
def test_requirement_that_nothing_measures_is_refused(measuring_dir, tasks, required, message):
    settings = EvaluateConfig(tasks=tasks, tasks_dir=measuring_dir, require={required: 0.1})
    with pytest.raises(UserError) as caught:
        check_tasks(settings)
    assert f"evaluate.require = '{required}'" in str(caught.value)
    assert message in str(caught.value)


def test_unknown_task_is_refused_with_the_nearest_names_of_folder_and_harness(measuring_dir):
    """By the index that the stage loads its tasks from, too."""
    settings = EvaluateConfig(tasks=["arc_eazy"], tasks_dir=measuring_dir)
    with pytest.raises(
        UserError, match=r"'arc_eazy' is neither in .* nor among the tasks of lm_eval .*arc_easy"
    ):
        check_tasks(settings)


@pytest.mark.parametrize(
    ("definition", "changes", "message"),
    [
        ("unsafe_code: true", {"task_code": True}, "it runs code that the model writes"),
        ("doc_to_image: image", {"task_code": True}, "it needs images or sound"),
        ("num_fewshot: 0", {"num_fewshot": 2}, "is defined without examples"),
    ],
)
def test_task_that_cannot_run_is_refused_by_its_definition(tmp_path, definition, changes, message):
    (tmp_path / "one.yaml").write_text(f"task: one\n{definition}\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [one]\n")
    with pytest.raises(UserError, match=message):
        check_tasks(EvaluateConfig(tasks=["all"], tasks_dir=str(tmp_path), **changes))


def test_what_a_group_says_goes_before_what_its_task_says(tmp_path):
    (tmp_path / "one.yaml").write_text("task: one\nnum_fewshot: 0\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [one]\nnum_fewshot: 2\n")
    check_tasks(EvaluateConfig(tasks=["all"], tasks_dir=str(tmp_path), num_fewshot=2))


@pytest.mark.parametrize("repeats", ["1000000000", "0", "-1", "'many'", "[1]", ".inf"])
@pytest.mark.parametrize(
    "text", ["task: one\nrepeats: {}", "group: g\ntask: [{{task: one, repeats: {}}}]"]
)
def test_number_of_answers_has_a_bound(tmp_path, text, repeats):
    (tmp_path / "one.yaml").write_text(text.format(repeats))
    with pytest.raises(UserError, match=r"one\.yaml: repeats = .* from 1 to 1000"):
        refuse_code(str(tmp_path))


@pytest.mark.parametrize(
    ("known", "registered"),
    [
        (task_files.METRICS, registry.metric_registry.keys()),
        (task_files.AGGREGATIONS, registry.aggregation_registry.keys()),
        (task_files.FILTERS | {"custom"}, registry.filter_registry.keys()),
        (task_files.SAMPLERS, samplers.SAMPLER_REGISTRY.keys()),
        (task_files.OUTPUT_TYPES, registry.DEFAULT_METRIC_REGISTRY.keys()),
    ],
    ids=["metrics", "aggregations", "filters", "samplers", "output types"],
)
def test_names_are_those_of_the_harness(known, registered):
    assert set(known) == set(registered)


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_keys_are_those_of_the_harness_but_what_calls_functions():
    functions = {"process_docs", "process_results", "custom_dataset", "doc_to_image"}
    functions |= {"doc_to_audio", "unsafe_code", "use_prompt"}
    assert fields(TaskConfig) | fields(GroupConfig) | {"include"} == (task_files.TASK | functions)
    parts = task_files.PARTS
    assert fields(FewshotConfig) == parts["fewshot_config"] | {"process_docs"}
    assert fields(AggMetricConfig) == parts["aggregate_metric_list"]


def test_options_of_filters_and_metrics_are_those_of_the_harness():
    filters = [registry.filter_registry.get(name) for name in task_files.FILTERS]
    options = {name for one in filters for name in inspect.signature(one.__init__).parameters}
    # `take_first_k` takes its `k` by keyword.
    assert options - {"self", "kwargs"} | {"k", "function"} == task_files.PARTS["filter"]
    options = set(inspect.signature(exact_match_hf_evaluate).parameters)
    own = {"metric", "aggregation", "higher_is_better", "multi_target"}
    assert options - {"predictions", "references"} | own == task_files.PARTS["metric_list"]

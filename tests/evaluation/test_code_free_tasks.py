"""What passes as free of code is what the installed harness has, and nothing that it looks up
elsewhere."""

import dataclasses
import inspect

import lm_eval.api.metrics
import lm_eval.filters  # noqa: F401
import pytest
from lm_eval.api import registry, samplers
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.config.group import AggMetricConfig, GroupConfig
from lm_eval.config.task import FewshotConfig, TaskConfig

from workflow.lib.evaluation import code_free_tasks


@pytest.mark.parametrize(
    ("known", "registered"),
    [
        (code_free_tasks.METRICS, registry.metric_registry.keys()),
        (code_free_tasks.AGGREGATIONS, registry.aggregation_registry.keys()),
        (code_free_tasks.FILTERS | {"custom"}, registry.filter_registry.keys()),
        (code_free_tasks.SAMPLERS, samplers.SAMPLER_REGISTRY.keys()),
        (code_free_tasks.OUTPUT_TYPES, registry.DEFAULT_METRIC_REGISTRY.keys()),
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
    assert fields(TaskConfig) | fields(GroupConfig) | {"include"} == (
        code_free_tasks.TASK | functions
    )
    parts = code_free_tasks.PARTS
    assert fields(FewshotConfig) == parts["fewshot_config"] | {"process_docs"}
    assert fields(AggMetricConfig) == parts["aggregate_metric_list"]


def test_options_of_filters_and_metrics_are_those_of_the_harness():
    filters = [registry.filter_registry.get(name) for name in code_free_tasks.FILTERS]
    options = {name for one in filters for name in inspect.signature(one.__init__).parameters}
    # `take_first_k` takes its `k` by keyword.
    assert options - {"self", "kwargs"} | {"k", "function"} == code_free_tasks.PARTS["filter"]
    options = set(inspect.signature(exact_match_hf_evaluate).parameters)
    own = {"metric", "aggregation", "higher_is_better", "multi_target"}
    assert options - {"predictions", "references"} | own == code_free_tasks.PARTS["metric_list"]

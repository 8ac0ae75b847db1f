"""Keys and names of a task file that run no code.

The harness imports the functions of `!function`, runs metrics that it does not know, and
Transformers runs `custom_generate`. So only known data passes, and names of the harness' own
registries (lm_eval 0.4.13; the tests compare these tables with it)."""

from collections.abc import Iterator, Mapping
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METRICS = _words(
    "acc acc_all acc_bytes acc_mutual_info acc_norm bits_per_byte bleu brier_score bypass "
    "byte_perplexity chrf chrf++ exact_match f1 likelihood mcc perplexity ter word_perplexity"
)
AGGREGATIONS = _words(
    "bits_per_byte bleu brier_score bypass chrf chrf++ f1 matthews_corrcoef mean median nanmean "
    "perplexity ter weighted_perplexity"
)
# Without `custom`, which calls a function.
FILTERS = _words(
    "format_span lowercase majority_vote map multi_choice_regex regex regex_pos remove_whitespace "
    "take_first take_first_k uppercase"
)
SAMPLERS = frozenset({"default", "first_n"})
OUTPUT_TYPES = frozenset(
    {"loglikelihood", "loglikelihood_rolling", "generate_until", "multiple_choice"}
)
# Without the others of the package `datasets`: some import modules named in their options.
READERS = frozenset({"json", "csv", "parquet", "text", "arrow"})

PROMPT = _words(
    "doc_to_text doc_to_choice doc_to_target gen_prefix fewshot_delimiter target_delimiter"
)
TASK = PROMPT | _words(
    "task task_alias tag group group_alias include dataset_path dataset_name dataset_kwargs "
    "training_split validation_split test_split fewshot_split description fewshot_config "
    "num_fewshot metric_list output_type generation_kwargs repeats filter_list "
    "should_decontaminate doc_to_decontamination_query aggregate_metric_list metadata"
)
PARTS: Mapping[str, frozenset[str]] = {
    "dataset_kwargs": _words(
        "data_files data_dir split revision field delimiter sep names column_names header "
        "quotechar encoding columns sample_by keep_linebreaks"
    ),
    "fewshot_config": PROMPT | {"sampler", "split", "fewshot_indices", "samples"},
    "metric_list": _words(
        "metric aggregation higher_is_better regexes_to_ignore ignore_case ignore_punctuation "
        "ignore_numbers multi_target"
    ),
    "aggregate_metric_list": frozenset({"metric", "filter_list", "aggregation", "weight_by_size"}),
    "filter_list": frozenset({"name", "filter"}),
    "filter": _words(
        "function regex_pattern group_select fallback ignore_case ignore_punctuation "
        "regexes_to_ignore k mapping_dict default_value"
    ),
    "generation_kwargs": _words(
        "until max_gen_toks max_new_tokens min_new_tokens max_length do_sample temperature top_k "
        "top_p min_p typical_p repetition_penalty no_repeat_ngram_size num_beams length_penalty "
        "early_stopping"
    ),
}
NAMES: Mapping[str, frozenset[str]] = {
    "metric_list.metric": METRICS,
    "metric_list.aggregation": AGGREGATIONS,
    "aggregate_metric_list.aggregation": frozenset({"mean"}),
    "filter.function": FILTERS,
    "fewshot_config.sampler": SAMPLERS,
    "output_type": OUTPUT_TYPES,
}


def possible_code(definition: Mapping[Any, Any]) -> Iterator[str]:
    """Yield, in words, keys and names of a task, group or member that may run code."""
    yield from _unknown(definition, TASK, prefix="")
    yield from _dataset(definition.get("dataset_path"))
    for member in _listed(definition.get("task")):
        if isinstance(member, Mapping):
            yield from possible_code(member)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unknown(section: Mapping[Any, Any], keys: frozenset[str], *, prefix: str) -> Iterator[str]:
    for key, value in section.items():
        if value is None or value is False:  # not used: `process_docs: null`
            continue
        known = NAMES.get(f"{prefix}{key}")
        if key not in keys:
            yield f"{prefix}{key}, which is none of the keys {', '.join(sorted(keys))}"
        elif known is not None and (not isinstance(value, str) or value not in known):
            yield (
                f"{prefix}{key} = {str(value)[:80]!r}, which is none of the harness' own: "
                f"{', '.join(sorted(known))}"
            )
        elif key in PARTS:
            for entry in _listed(value):
                if isinstance(entry, Mapping):
                    yield from _unknown(entry, PARTS[key], prefix=f"{key}.")
                else:
                    yield f"{prefix}{key} = {str(entry)[:80]!r}, which is no section"


def _dataset(path: Any) -> Iterator[str]:
    """Names other than a reader, a hub repository or a folder are readers that may import code."""
    if path is None or path in READERS:
        return
    if not isinstance(path, str) or "/" not in path or "://" in path:
        yield (
            f"dataset_path = {str(path)[:80]!r}, which is none of {', '.join(sorted(READERS))}, no "
            "folder (./name) and no repository (owner/name)"
        )

"""From settings to artifacts: the folder of each stage of a run, and the settings that it reads.

A shared artifact's folder carries a key: the short hash of everything that it depends on, so two
runs with equal data settings share one tokenization. A stage receives exactly the settings that it
reads (`Affects`): those that its result depends on in a file that is an input of its rule, and the
others in a file that is none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from workflow.lib.checkpoints.files.model_files import ADAPTER, ADAPTER_WEIGHTS
from workflow.lib.data.reading.sources import resolve_splits
from workflow.lib.data.tokens.token_store import ARRAYS, MANIFEST
from workflow.lib.settings.config import ReportConfig, RunConfig, Section, is_hub_id
from workflow.lib.settings.evaluate import LLAMA_CPP_RELEASE
from workflow.lib.settings.forms import EXPORTS
from workflow.lib.settings.objectives import PAIRED, needs_of
from workflow.lib.settings.rounds import MOST_ROUNDS
from workflow.lib.settings.section_base import Affects
from workflow.lib.system.files import short_hash

RESULTS = PurePosixPath("results")
# Finished measurements of all runs (`archive`). No rule declares it: Snakemake deletes outputs
# before a job.
EVALUATIONS = str(RESULTS / "evaluations")
# llama.cpp's converters, unless a checkout is named.
CONVERTERS = str(RESULTS / "llama_cpp" / LLAMA_CPP_RELEASE)

# Python of the servers' environment, made by `make serving` in the checkout.
SERVING = str(Path(__file__).resolve().parents[3] / ".venv-serving" / "bin" / "python")


def _comparable(run: RunConfig, counts: Callable[[Affects], bool]) -> RunConfig:
    """Return the settings with defaults for all that do not count: equal results have equal
    ones."""
    changed = {}
    for name, section in _sections(run):
        defaults, of = type(section)(), section.affected_by
        update = {
            key: getattr(defaults, key)
            for key in type(section).model_fields
            if not counts(of(key)) or not _has_meaning(section, of(key))
        }
        changed[name] = section.model_copy(update=update)
    return run.model_copy(update=changed)


def _sections(run: RunConfig) -> list[tuple[str, Section]]:
    return [(name, getattr(run, name)) for name in RunConfig.model_fields]


def _has_meaning(section: Section, affects: Affects) -> bool:
    needed, *values = affects.needs or (None,)
    return needed is None or getattr(section, needed) in values


def _plain(section: Section, wanted: Callable[[Affects], bool]) -> dict[str, Any]:
    """Return the wanted settings of a section as JSON."""
    keys = {key for key in type(section).model_fields if wanted(section.affected_by(key))}
    return section.model_dump(mode="json", include=keys)


def _defines_result(affects: Affects) -> bool:
    return affects.effect == "result"


def model_key(run: RunConfig) -> str:
    return short_hash([*_model(run), *_rope(run)])


def _rope(run: RunConfig) -> list[Any]:
    """Return the scaling of rotary positions; tokens do not depend on it."""
    return [scaling] if (scaling := run.model.rope_scaling.parameters) else []


def _model(run: RunConfig) -> list[Any]:
    """Return all that the original depends on, with its added tokens."""
    added = [run.model.add_tokens] if run.model.add_tokens else []
    return [run.model.source, run.model.revision, *added]


def dataset_key(run: RunConfig) -> str:
    return short_hash([run.data.source, run.data.revision, dataset_paths(run)])


def tokens_key(run: RunConfig) -> str:
    """Short hash of all that the tokens of the training depend on."""
    if not run.samples:
        return rows_key(run)
    return short_hash([rewards_key(run), stage_settings("pack_answers", run)])


def rows_key(run: RunConfig) -> str:
    """Short hash of all that the tokens of a run's rows depend on: data settings and the
    tokenizer's identity."""
    data = _comparable(run, _defines_result).data.model_dump(mode="json")
    return short_hash([data, *_model(run), *_examples_asked(run).values()])


def _examples_asked(run: RunConfig) -> dict[str, Any]:
    """Return the kind of a run's examples in its data, if they are not texts, as prompts are."""
    own = needs_of(run.train.objective).examples in PAIRED and not run.samples
    return _examples_trained(run) if own else {}


def _examples_trained(run: RunConfig) -> dict[str, Any]:
    """Return the kind of a run's examples, if they are not texts."""
    examples = needs_of(run.train.objective).examples
    return {} if examples == "texts" else {"examples": examples}


def answers_key(run: RunConfig) -> str:
    """Short hash of all that sampled answers depend on: model, prompts and settings."""
    start = run.start_key or run.train.start_from
    same = _comparable(run, lambda affects: affects.reruns("sample_answers"))
    numerics = [base_key(run), run.model.compute_dtype, run.model.attention]
    if run.serves_answers:
        numerics = [model_key(run), run.model.compute_dtype]
    answers = same.answers.model_dump(mode="json")
    return short_hash([rows_key(run), start, answers, numerics])


def rewards_key(run: RunConfig) -> str:
    return short_hash([answers_key(run), stage_settings("score_answers", run)])


def next_rounds(runs: Mapping[str, RunConfig]) -> dict[str, RunConfig]:
    """Return for each run that samples the round whose answers tell what it has learned: the next
    one, or after the last one answers to the held-out prompts alone."""
    later = {run.train.start_from: run for run in runs.values() if [*_rounds_before(run, 1)]}
    return {
        name: later[name] if name in later else _after(name, run)
        for name, run in runs.items()
        if run.samples
    }


def _after(name: str, run: RunConfig) -> RunConfig:
    answers = {"round": run.answers.round + 1, "prompts_per_round": 0}
    changed = {
        "answers": run.answers.model_copy(update=answers),
        "train": run.train.model_copy(update={"start_from": name}),
    }
    after = run.model_copy(update=changed)
    return after.starting_from(run, run.lora, key=fingerprint(run))


def _rounds_before(run: RunConfig, count: int) -> Iterator[RunConfig]:
    """Yield up to `count` rounds before a run, the last one first, that answer the same held-out
    prompts for the same rewards."""
    own = {"round": 1, "prompts_per_round": 1}
    for _ in range(min(count, run.answers.round - 1)):
        start = run.start
        if start is None or not start.samples or start.data != run.data:
            return
        answers = [of.answers.model_copy(update=own) for of in (start, run)]
        if answers[0] != answers[1] or start.rewards.functions != run.rewards.functions:
            return
        yield start
        run = start


def first_rewards(run: RunConfig) -> list[str]:
    """Return the rewards of the first round before a run, with which its own are compared."""
    return [rewards_file(first) for first in [*_rounds_before(run, MOST_ROUNDS)][-1:]]


def earlier_rewards(run: RunConfig) -> list[str]:
    """Return the rewards of the rounds before a run that decide with its own whether it stops, the
    last one first."""
    return [rewards_file(r) for r in _rounds_before(run, run.rewards.stop_after_equal - 1)]


def base_key(run: RunConfig) -> str:
    """Short hash of all that the quantized base depends on; of the plan's settings only if
    preflight decides what it keeps."""
    planned = [stage_settings("preflight_run", first_run(run))] if run.quantize.measures else []
    return short_hash([*_base(run), *planned])


def _base(run: RunConfig) -> list[Any]:
    """Return all that the base depends on besides a plan; tokens only if they calibrate, or
    measure."""
    settings = _comparable(run, _defines_result).quantize.model_dump(mode="json")
    reads_tokens = run.quantize.calibrates or run.quantize.measures
    tokens = rows_key(first_run(run)) if reads_tokens else None
    return [*_model(run), *_rope(run), settings, tokens]


def sensitivity_path(run: RunConfig) -> str:
    """File of the costs of 4 bits by weight: of a model, its tokens, and a text."""
    first = first_run(run)
    quantize = stage_settings("measure_sensitivity", first)
    key = short_hash([*_model(first), *_rope(first), quantize, rows_key(first)])
    return str(RESULTS / "sensitivities" / f"{run.model.name}-{key}.json")


def first_run(run: RunConfig) -> RunConfig:
    """Return the first run of the chain to this one: they share its base."""
    return run if run.start is None else first_run(run.start)


def calibration_tokens(run: RunConfig) -> list[str]:
    """Return the files of the tokens that calibrate the base, the manifest first, or none."""
    return measured_tokens(run) if run.quantize.calibrates else []


def measured_tokens(run: RunConfig) -> list[str]:
    """Return the files of the tokens of the first run of a chain, the manifest first."""
    return rows_files(first_run(run))


def calibration_text(run: RunConfig) -> str | None:
    """Return the text that calibrates the base; None without calibration, or if none is named."""
    return run.quantize.calibration_text if run.quantize.calibrates else None


def source_dir(run: RunConfig) -> str:
    """Folder of the named model: the user's own, or the downloaded one."""
    if is_hub_id(run.model.source):
        key = short_hash([run.model.source, run.model.revision])
        return str(RESULTS / "hub" / "model" / f"{run.model.name}-{key}")
    return run.model.source


def model_dir(run: RunConfig) -> str:
    """Folder of the original base model: the named one, or with added tokens or scaled positions
    its copy."""
    if run.model.is_copied:
        return str(RESULTS / "extended" / f"{run.model.name}-{model_key(run)}")
    return source_dir(run)


def start_adapter(run: RunConfig) -> str | None:
    """Folder of the adapter that a run starts from: another run's, the user's own, or the
    downloaded one; None for a new adapter."""
    start = run.train.start_from
    if start is None or run.start is not None:
        return start and f"{stage_dir(start, 'consolidate')}/adapter"
    if is_hub_id(start):
        name = PurePosixPath(start).name
        return str(RESULTS / "hub" / "adapter" / f"{name}-{short_hash([start])}")
    return start


def start_files(run: RunConfig) -> list[str]:
    """Return the files of the adapter that a run starts from; of a download, its folder."""
    folder = start_adapter(run)
    if folder is None or folder in download_dirs(run).values():
        return [folder] if folder else []
    return [f"{folder}/{name}" for name in (ADAPTER_WEIGHTS, ADAPTER)]


def lineage(run: RunConfig) -> list[dict[str, str]]:
    """Return the ancestors of a run: an adapter from elsewhere, and the runs, in order."""
    start = run.train.start_from
    if start is None:
        return []
    if run.start is None:
        return [{"adapter": start}]
    objective, data = run.start.train.objective, run.start.data.name
    return [*lineage(run.start), {"run": start, "data": data, "objective": objective}]


def description(run: RunConfig) -> str:
    return str(RESULTS / "models" / f"{run.model.name}-{model_key(run)}" / "description.json")


def dataset_paths(run: RunConfig) -> list[str]:
    return [source.path for source in (*run.data.train_sources, *run.data.heldout_sources)]


def dataset_dir(run: RunConfig) -> str | None:
    """Folder of the downloaded dataset; None for local files."""
    if run.data.source is None:
        return None
    return str(RESULTS / "hub" / "dataset" / f"{run.data.name}-{dataset_key(run)}")


def data_files(run: RunConfig) -> list[str]:
    """Paths of the raw data files, in the order in which they are read; of a hub dataset, its
    folder. Raises `UserError` if a local path names no file."""
    folder = dataset_dir(run)
    if folder is not None:
        return [folder]
    splits = resolve_splits(run.data, root=Path())
    sources = (source for sources in splits.values() for source in sources)
    return [file.file for source in sources for file in source.files]


def download_dirs(run: RunConfig) -> dict[str, str]:
    """Return the folders to download for a run, by kind (`model`, `dataset`, `adapter`)."""
    start = run.train.start_from
    is_on_hub = start is not None and run.start is None and is_hub_id(start)
    folders = {
        "model": source_dir(run) if is_hub_id(run.model.source) else None,
        "dataset": dataset_dir(run),
        "adapter": start_adapter(run) if is_on_hub else None,
    }
    return {kind: folder for kind, folder in folders.items() if folder}


def download_settings(kind: str, run: RunConfig) -> dict[str, Any]:
    """Return the settings of `download_source` for one of `download_dirs`."""
    if kind != "dataset":
        model_source = run.model.source, run.model.revision
        repo_id, revision = model_source if kind == "model" else (run.train.start_from, None)
        return {"repo_id": repo_id, "revision": revision, "kind": kind, "files": None}
    return {
        "repo_id": run.data.source,
        "revision": run.data.revision,
        "kind": kind,
        "files": dataset_paths(run),
    }


TASK_PATTERNS = ("*.yaml", "*.yml", "*.json", "*.jsonl", "*.csv", "*.parquet", "*.py")


def local_files(folder: str, patterns: Sequence[str]) -> list[str]:
    """Return the files of `folder` that match, sorted; the folder itself before a download."""
    path = Path(folder)
    if PurePosixPath(folder).is_relative_to(RESULTS):
        return [folder]
    return sorted({str(p) for pattern in patterns for p in path.glob(pattern) if p.is_file()})


def tokens_dir(run: RunConfig) -> str:
    return str(RESULTS / "tokens" / f"{run.data.name}-{tokens_key(run)}")


def token_arrays(run: RunConfig) -> list[str]:
    return [f"{tokens_dir(run)}/{name}" for name in ARRAYS]


def rows_dir(run: RunConfig) -> str:
    """Folder of the tokens of a run's rows: those of its training, or the prompts of its
    answers."""
    return str(RESULTS / "tokens" / f"{run.data.name}-{rows_key(run)}")


def rows_files(run: RunConfig) -> list[str]:
    """Return the files of `rows_dir`, the manifest first."""
    return [f"{rows_dir(run)}/{name}" for name in (MANIFEST, *ARRAYS)]


def answers_dir(run: RunConfig) -> str:
    return str(RESULTS / "answers" / f"{run.data.name}-{answers_key(run)}")


def rewards_file(run: RunConfig) -> str:
    return str(RESULTS / "rewards" / f"{run.data.name}-{rewards_key(run)}" / "rewards.jsonl")


def base_dir(run: RunConfig) -> str:
    return str(RESULTS / "base" / f"{run.model.name}-{base_key(run)}")


def stage_dir(name: str, stage: str) -> str:
    return str(RESULTS / "runs" / name / stage)


def folder_of_form(name: str, form: str) -> str:
    """Folder of an exported form of a run."""
    return stage_dir(name, EXPORTS[form].folder)


def fingerprint(run: RunConfig, *, any_length: bool = False) -> str:
    """Short hash of the training trajectory's settings; any_length: without its end. What preflight
    keeps in 16 bits is content of the base."""
    trained = _comparable(run, _defines_result)
    train = trained.train.model_dump(mode="json")
    if any_length:
        train |= {"epochs": None, "max_steps": None}
    sections = (trained.lora, trained.preferences, trained.distill, trained.grpo)
    others = [section.model_dump(mode="json") for section in sections]
    numerics = [run.model.compute_dtype, run.model.attention_dropout, run.model.attention]
    # sampled answers depend on the start already
    start = None if run.samples else run.start_key
    return short_hash([tokens_key(run), short_hash(_base(run)), train, others, numerics, start])


def checkpoint_dir(name: str, run: RunConfig) -> str:
    """Folder of a run's checkpoints, from which alone it resumes. A longer run
    continues them. No rule's output: Snakemake deletes these at failures."""
    key = fingerprint(run, any_length=run.train.begins_longer_runs)
    return str(RESULTS / "checkpoints" / f"{name}-{key}")


def stage_settings(stage: str, run: RunConfig) -> dict[str, Any]:
    """Return the settings that a stage's result depends on, as JSON: an input of its rule.

    Others have their defaults; words for what the run decides are replaced by it."""
    chosen = run.evaluate.model_copy(update={"subjects": run.subjects, "served": run.served})
    decided = run.model_copy(update={"evaluate": chosen})
    same = _comparable(decided, lambda affects: affects.reruns(stage))
    return _read_by(same, lambda affects: affects.reruns(stage)) | _consequences(stage, run)


def free_settings(stage: str, run: RunConfig) -> dict[str, Any]:
    """Return the settings that a stage reads and that do not change its result, as JSON."""
    return _read_by(run, lambda affects: affects.read_by(stage) and not affects.reruns(stage))


def _read_by(run: RunConfig, wanted: Callable[[Affects], bool]) -> dict[str, Any]:
    sections = {name: _plain(section, wanted) for name, section in _sections(run)}
    return {name: settings for name, settings in sections.items() if settings}


def _consequences(stage: str, run: RunConfig) -> dict[str, Any]:
    """Return what a stage reads of settings that it does not read themselves."""
    if stage == "tokenize_dataset":
        return _examples_asked(run)
    if stage == "pack_answers":
        return _examples_trained(run)
    return {"lineage": lineage(run)} if stage == "finetune" and run.train.start_from else {}


def settings_path(stage: str, name: str, settings: Mapping[str, Any]) -> str:
    """Return the file of a stage's settings. Its name has their hash: other settings of a dry run,
    or of a second Snakemake, are another file."""
    return str(RESULTS / "settings" / stage / f"{name}-{short_hash(settings)}.json")


def model_checks(runs: Mapping[str, RunConfig], *, trains_here: bool) -> dict[str, Any]:
    """Return the settings that `describe_model` and `download_source` compare with the model, of
    all runs that wait for it. They change none of their outputs."""
    return {"trains_here": trains_here, "runs": _changed(runs)}


def report_settings(report: ReportConfig, runs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Return the settings of the report: its section, and each run's that have an effect."""
    same = {name: _comparable(run, lambda a: a.effect != "none") for name, run in runs.items()}
    return {"report": report.model_dump(mode="json"), "runs": _changed(same)}


def free_report_settings(runs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Return each run's settings, also those without effect: with them it can be reproduced."""
    return {"runs": _changed(runs)}


def _changed(runs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Return each run's settings that differ from the defaults, without trackers."""
    return {
        name: run.model_dump(mode="json", exclude_defaults=True, exclude={"tracking"})
        for name, run in runs.items()
    }

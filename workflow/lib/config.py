"""Every setting of the workflow: its type, bound, unit, default and effect.

One frozen pydantic model per section; the docstring under a field is its only documentation, from
which the JSON schema, the reference table and `config.yaml`'s comments are checked. `load_config`
turns the YAML document into one `RunConfig` per run (`runs:` overrides any setting), so everything
downstream sees complete, validated values. Imports no torch and reads nothing but the document.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from workflow.lib.benchmark_config import BenchmarkConfig
from workflow.lib.config_errors import explain
from workflow.lib.data_config import DataColumns, DataConfig, DataSource
from workflow.lib.errors import UserError, setting_error
from workflow.lib.evaluate_config import EvaluateConfig, ExportConfig, ReportConfig
from workflow.lib.section import Name, Section
from workflow.lib.sources import resolve_splits
from workflow.lib.tracking_config import TrackingConfig
from workflow.lib.train_config import (
    HardwareConfig,
    LoraSettings,
    ModelConfig,
    QuantizeConfig,
    TrainConfig,
)

__all__ = [
    "BenchmarkConfig", "Config", "DataColumns", "DataConfig", "DataSource", "EvaluateConfig", "ExportConfig", "HardwareConfig",
    "LoraSettings", "ModelConfig", "QuantizeConfig", "ReportConfig", "RunConfig", "Section",
    "TrackingConfig", "TrainConfig", "check_local_paths", "is_hub_id", "json_schema", "load_benchmark", "load_config",
    "merge",
]  # fmt: skip

SectionT = TypeVar("SectionT", bound=Section)
# Of all files and options together: which of them a setting stands in, only Snakemake knows.
NOT_VALID = "the settings are not valid:"


class RunConfig(Section):
    """All settings of one run."""

    model: ModelConfig = ModelConfig()
    """The base model."""
    data: DataConfig = DataConfig()
    """The dataset and how it becomes tokens."""
    quantize: QuantizeConfig = QuantizeConfig()
    """NF4 quantization of the base."""
    lora: LoraSettings = LoraSettings()
    """The adapter."""
    train: TrainConfig = TrainConfig()
    """The optimization."""
    hardware: HardwareConfig = HardwareConfig()
    """What a run may use."""
    tracking: TrackingConfig = TrackingConfig()
    """The live view of the training."""
    export: ExportConfig = ExportConfig()
    """What is exported."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What is measured."""


class Config(RunConfig):
    """The whole document: shared settings, the report, the benchmark, and the runs that override the settings."""

    report: ReportConfig = ReportConfig()
    """The report over all runs."""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """What the target `benchmark` measures."""
    runs: dict[Name, dict[str, Any] | None] = Field({"demo": {}}, min_length=1)
    """One entry per run: settings that differ from the shared ones (same keys); {} = none."""


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `override` laid over it, section by section; lists are replaced.

    A section with nothing below it (null) overrides nothing.
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping | None):
            value = merge(old, value or {})
        merged[key] = value
    return merged


def load_config(document: Mapping[str, Any]) -> tuple[ReportConfig, dict[str, RunConfig]]:
    """Validate a parsed `config.yaml`; return the report's settings and every run's, by name.

    Raises `UserError` naming each wrong key's path, its value, the bound, and the nearest valid key.
    """
    config = _validate(Config, document, prefix="")
    shared = {key: document[key] for key in RunConfig.model_fields if key in document}
    runs = {
        name: _validate(RunConfig, merge(shared, override or {}), prefix=f"runs.{name}.")
        for name, override in config.runs.items()
    }
    return config.report, runs


def load_benchmark(document: Mapping[str, Any]) -> BenchmarkConfig:
    """Validate a parsed `config.yaml` and return its section `benchmark`; raises `UserError` as `load_config` does."""
    return _validate(Config, document, prefix="").benchmark


def _validate(model: type[SectionT], document: Mapping[str, Any], *, prefix: str) -> SectionT:
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        lines = [prefix + line for line in explain(model, document, error)]
        raise UserError(f"{NOT_VALID}\n  " + "\n  ".join(lines)) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `config.yaml`, for editors."""
    return Config.model_json_schema()


def check_local_paths(name: str, run: RunConfig) -> None:
    """Raise `UserError` if a local path that the run names does not exist. Hub ids are not looked up."""
    paths = {
        "data.chat_template": run.data.chat_template,
        "evaluate.tasks_dir": run.evaluate.tasks_dir,
        "hardware.calibration": run.hardware.calibration,
    }
    if not is_hub_id(run.model.source):
        paths["model.source"] = run.model.source
        if run.model.revision is not None:
            raise UserError(
                f"model.revision = {run.model.revision!r} (run {name}): model.source = {run.model.source!r} "
                "is a local directory, which has no revision. Remove revision, or name a hub id."
            )
    if run.data.source is None:
        try:
            splits = resolve_splits(run.data, root=Path())
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None
        for split, sources in splits.items():
            for file in (file.file for source in sources for file in source.files):
                _check_braces(f"data.{split}", file)
    for key, value in paths.items():
        _check_braces(key, value or "")
        if value and value.startswith("-"):
            reason = "it begins like an option of a command"
            raise setting_error(key, value, reason, f"Write ./{value}")
        if value is not None and not _exists(value):
            raise UserError(
                f"{key} = {value!r} (run {name}): there is no such file or folder. "
                "Give a path that exists, relative to the folder you run in"
                + (", or a hub id of the form owner/name." if key == "model.source" else ".")
            )


def _check_braces(key: str, path: str) -> None:
    if "{" in path or "}" in path:
        reason = "Snakemake reads braces in a path as wildcards"
        raise setting_error(key, path, reason, "Rename the file or folder")


def is_hub_id(source: str) -> bool:
    """Tell whether `source` names a hub repository: `owner/name`, and no local path of that name exists."""
    parts = source.split("/")
    looks_like_id = len(parts) == 2 and all(parts) and not source.startswith((".", "~"))
    return looks_like_id and not _exists(source)


def _exists(path: str) -> bool:
    """Tell whether there is such a file or folder that this user can see; a name that no file can have is none."""
    try:
        return Path(path).exists()
    except OSError:
        return False

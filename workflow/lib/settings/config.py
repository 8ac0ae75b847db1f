"""Every setting of the workflow: its type, bound, unit, default and effect.

One frozen pydantic model per section; the docstring under a field is its only documentation, with
which the JSON schema, the reference table and `config.yaml`'s comments are compared. `load_config`
turns the YAML document into one `RunConfig` per run (`runs:` overrides any setting), so all other
code gets complete, validated values. Imports no torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from workflow.lib.settings.data import DataColumns, DataConfig, DataSource
from workflow.lib.settings.errors_in_words import explain
from workflow.lib.settings.evaluate import (
    HELDOUT_LOSS,
    REWARD,
    REWARDS,
    EvaluateConfig,
    ExportConfig,
    ReportConfig,
)
from workflow.lib.settings.forms import EXPORTS, FORMS, SUBJECTS, TRAINED, Served, SubjectName
from workflow.lib.settings.objectives import (
    NEEDS,
    PAIRED,
    DistillConfig,
    GrpoConfig,
    PreferencesConfig,
    needs_of,
    readers_of,
    reads_start,
)
from workflow.lib.settings.overrides import overridden, without_effect
from workflow.lib.settings.rounds import AnswersConfig, RewardsConfig, expanded
from workflow.lib.settings.section_base import Name, Section
from workflow.lib.settings.server_limits import first_limit
from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.settings.train import (
    HardwareConfig,
    LoraSettings,
    ModelConfig,
    QuantizeConfig,
    TrainConfig,
)
from workflow.lib.system.errors import UserError

__all__ = [
    "AnswersConfig",
    "Config",
    "DataColumns",
    "DataConfig",
    "DataSource",
    "DistillConfig",
    "EvaluateConfig",
    "ExportConfig",
    "GrpoConfig",
    "HardwareConfig",
    "LoraSettings",
    "ModelConfig",
    "PreferencesConfig",
    "QuantizeConfig",
    "ReportConfig",
    "RewardsConfig",
    "RunConfig",
    "Section",
    "TrackingConfig",
    "TrainConfig",
    "check_sources",
    "ineffective_settings",
    "is_hub_id",
    "load_config",
    "validated",
]

# What the hub allows.
MODEL_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)
SectionT = TypeVar("SectionT", bound=Section)
OWN_KEYS = "x-"  # prefix of the user's own top-level keys
# Of all files and options together: only Snakemake knows which one has a setting.
NOT_VALID = "the settings are not valid:"
DEFAULT_RUN = "first"
NO_REWARD = (
    "No function rewards the answers. Name one, such as {exact: {function: last_number}}, or "
    "remove them"
)
# Objectives of sampled answers: the best ones, pairs of best and worst, or groups.
SAMPLING = [
    name
    for name, needs in NEEDS.items()
    if name == "sft" or needs.examples not in ("texts", "rated")
]
LEAST_CONFIG = """\
model:
  source: models/my-model   # a folder, or a hub id: owner/name
data:
  train: data/chats.jsonl   # a file, folder or glob"""


class Sections(Section):
    """The sections of a run, each by itself."""

    model: ModelConfig = ModelConfig()
    """The base model."""
    data: DataConfig = DataConfig()
    """The dataset and how it becomes tokens."""
    quantize: QuantizeConfig = QuantizeConfig()
    """Bits of the frozen base."""
    lora: LoraSettings = LoraSettings()
    """The adapter."""
    train: TrainConfig = TrainConfig()
    """The optimization."""
    preferences: PreferencesConfig = PreferencesConfig()
    """Preferences: pairs and rated answers."""
    distill: DistillConfig = DistillConfig()
    """A teacher's predictions."""
    grpo: GrpoConfig = GrpoConfig()
    """Rewarded answers of the model itself."""
    answers: AnswersConfig = AnswersConfig()
    """Sampled answers to train on."""
    rewards: RewardsConfig = RewardsConfig()
    """Rewards of sampled answers."""
    hardware: HardwareConfig = HardwareConfig()
    """Machines and memory."""
    tracking: TrackingConfig = TrackingConfig()
    """The live view of the training."""
    export: ExportConfig = ExportConfig()
    """The export."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """The evaluation."""


class RunConfig(Sections):
    """All settings of one run."""

    _start: "RunConfig | None" = PrivateAttr(None)
    _start_key: str | None = PrivateAttr(None)

    @property
    def start(self) -> "RunConfig | None":
        """The run that this one starts from (`artifacts.starts`); None for other adapters."""
        return self._start

    @property
    def start_key(self) -> str | None:
        """Hash of all that the run that this one starts from depends on, kept as chains are
        long."""
        return self._start_key

    def starting_from(
        self, start: "RunConfig | None", lora: LoraSettings, *, key: str | None = None
    ) -> "RunConfig":
        """Return these settings with the effects of `train.start_from`. key: `start_key`."""
        run = self.model_copy(update={"lora": lora})
        run._start, run._start_key = start, key
        return run

    @property
    def samples(self) -> bool:
        """Whether the run trains on sampled answers to the prompts of its rows."""
        return bool(self.rewards.functions)

    @property
    def serves_answers(self) -> bool:
        """Whether vLLM samples them."""
        return self.samples and self.answers.sampler == "vllm"

    @property
    def served(self) -> Served:
        """The served model, which the verdict is about."""
        if self.evaluate.served != "auto":
            return self.evaluate.served
        server = self.export.serve
        fallback = "tuned" if server == "none" else "tuned_on_original"
        exported = [
            name
            for name in self._measured_exports
            if server == "none" or FORMS[name].served_by(server)
        ]
        return [fallback, *exported][-1]

    @property
    def _measured_exports(self) -> list[str]:
        return [name for name in self.export.exported if name in SUBJECTS]

    @property
    def subjects(self) -> tuple[SubjectName, ...]:
        """The measured models, in display order."""
        chosen: set[SubjectName] = set(self.evaluate.subjects)
        if self.evaluate.subjects == "auto":
            chosen = {"original", "base", "tuned", self.served, *self._measured_exports}
            chosen |= {"start"} if self.start is not None else set()
        paired = needs_of(self.train.objective).examples in PAIRED
        if paired and self.evaluate.heldout and reads_start(self.train.objective, self.preferences):
            chosen.add("base" if self.train.start_from is None else "start")  # rewards need it
        return tuple(name for name in SUBJECTS if name in chosen)

    @model_validator(mode="after")
    def _served_model_is_measured(self) -> "RunConfig":
        for name in {self.served, *self.subjects} & EXPORTS.keys() - {*self.export.exported}:
            raise ValueError(
                f"export.{name} = false: evaluate.served or evaluate.subjects names the {name} "
                "model, and none is exported. Set it to true, or name another"
            )
        server = self.export.serve
        servable = server == "none" or FORMS[self.served].served_by(server)
        if not servable or (server != "none" and not self.evaluate.heldout):
            wrong = "heldout = false" if servable else f"served = {self.served}"
            labels = [FORMS[name].label for name in TRAINED if FORMS[name].served_by(server)]
            raise ValueError(
                f"export.serve = {server} and evaluate.{wrong}: it serves one of "
                f"{', '.join(labels)}, and its held-out loss is compared. "
                "Set evaluate.served to auto and evaluate.heldout to true"
            )
        form = FORMS[self.served].gguf
        if server == "llama_cpp" and not (self.export.gguf and form in self.export.gguf_of):
            raise ValueError(
                f"export.serve = llama_cpp: it serves a GGUF file of the form {form}, which is not "
                f"exported (gguf = {list(self.export.gguf)}, gguf_of = {list(self.export.gguf_of)})"
                ". Add it, or set serve to none"
            )
        if self.served not in self.subjects:
            raise ValueError(
                f"evaluate.subjects = {', '.join(self.subjects)}: what will be served "
                f"(evaluate.served: {self.served}) must be measured. Add it, or set auto"
            )
        return self

    @model_validator(mode="after")
    def _required_rewards_are_trained(self) -> "RunConfig":
        required = [name for name in REWARDS if name in self.evaluate.require]
        if required and needs_of(self.train.objective).examples not in PAIRED:
            raise ValueError(
                f"evaluate.require = {required[0]}: train.objective = {self.train.objective} "
                "trains no preferences. Require it of the runs that do "
                "(runs.<name>.evaluate.require)"
            )
        return self

    @model_validator(mode="after")
    def _required_sources_are_held_out(self) -> "RunConfig":
        sources = self.data.heldout_sources or self.data.train_sources
        measured = [f"{HELDOUT_LOSS}/{source.name or source.path}" for source in sources]
        required = [name for name in self.evaluate.require if name.startswith(f"{HELDOUT_LOSS}/")]
        if unknown := [name for name in required if name not in measured]:
            raise ValueError(
                f"evaluate.require = {unknown[0]}: no such source is held out. Name one of "
                f"{', '.join(measured)}, or add it to data.heldout"
            )
        return self

    @property
    def base_id(self) -> str | None:
        """The base model's id on the hub; None if only a folder of this machine is known."""
        return self.model.source if is_hub_id(self.model.source) else self.export.base_id

    @model_validator(mode="after")
    def _base_has_one_id(self) -> "RunConfig":
        if self.export.base_id is not None and is_hub_id(self.model.source):
            raise ValueError(
                f"export.base_id = {self.export.base_id}: the base is of the hub already "
                f"(model.source = {self.model.source}). Remove base_id"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_documents(self) -> "RunConfig":
        objective, data = self.train.objective, self.data
        examples = needs_of(objective).examples
        if examples in PAIRED and data.loss_on == "all":
            raise ValueError(
                f"data.loss_on = all: train.objective = {objective} compares answers, and prompts "
                "are none. Set completions"
            )
        sources = (*data.train_sources, *data.heldout_sources)
        treatments = {source.overlong for source in sources} or {data.overlong}
        if examples in PAIRED and "split" in treatments:
            raise ValueError(
                f"data.overlong = split: train.objective = {objective} is trained on {examples}, "
                "which cannot be divided. Set truncate or drop"
            )
        return self

    @model_validator(mode="after")
    def _served_within_known_limits(self) -> "RunConfig":
        if limit := first_limit(self):
            raise ValueError(limit)
        return self


class Config(Sections):
    """The whole document: shared settings, the report, and the runs that override the settings."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {f"^{OWN_KEYS}": {}}})

    report: ReportConfig = ReportConfig()
    """The report over all runs."""
    runs: dict[Name, dict[str, Any] | None] = Field({DEFAULT_RUN: {}}, min_length=1)
    """One entry per run: settings that differ from the shared ones (same keys); {} = none."""

    @model_validator(mode="before")
    @classmethod
    def _without_own_keys(cls, document: Any) -> Any:
        """Leave out the user's own keys, which hold YAML anchors."""
        if not isinstance(document, Mapping):
            return document
        return {key: document[key] for key in document if not str(key).startswith(OWN_KEYS)}

    @field_validator("runs")
    @classmethod
    def _names_differ_in_more_than_case(cls, runs: dict[str, object]) -> dict[str, object]:
        names: dict[str, str] = {}
        for name in runs:
            other = names.setdefault(name.casefold(), name)
            if other != name:
                raise ValueError(
                    f"{other!r} and {name!r} differ in case alone, and some file systems keep them "
                    "in one folder. Rename one of them"
                )
        return runs


def load_config(
    document: Mapping[str, object], *, origin: str = ""
) -> tuple[ReportConfig, dict[str, RunConfig]]:
    """Validate a parsed `config.yaml`; return the report's settings and every run's, by name.

    Raises `UserError` naming the document's origin, each wrong key's path, its value, the bound,
    and the nearest valid key."""
    headline = f"{origin}: {NOT_VALID}" if origin else NOT_VALID
    document = expanded(document)
    config = validated(Config, document, headline=headline)
    shared = {key: document[key] for key in RunConfig.model_fields if key in document}
    runs = {
        name: validated(
            RunConfig, overridden(shared, override or {}), prefix=f"runs.{name}.", headline=headline
        )
        for name, override in config.runs.items()
    }
    if lines := _unread_settings(document, config, runs):
        raise UserError("\n  ".join([headline, *lines]))
    return config.report, {name: _with_objective_defaults(run) for name, run in runs.items()}


def check_sources(runs: Mapping[str, RunConfig]) -> None:
    """Raise `UserError` for a run without a model or training data: they have no default."""
    for name, run in runs.items():
        sources = {"model.source": run.model.source, "data.train": run.data.train}
        if missing := [setting for setting, source in sources.items() if not source]:
            raise UserError(
                f"{' and '.join(missing)} must be set (run {name}). The least config file is\n\n"
                f"{LEAST_CONFIG}\n\nWrite yours as config.yaml, or name it: snakemake --cores all "
                "--configfile FILE. With --configfile, config.yaml is not read."
            )


def ineffective_settings(document: Mapping[str, object]) -> list[str]:
    """Return the settings above `runs:` that every run overrides, as `section.key`."""
    runs = document.get("runs")
    shared = {key: document[key] for key in RunConfig.model_fields if key in document}
    return without_effect(shared, runs) if isinstance(runs, Mapping) else []


def _objective_settings(run: Sections) -> dict[str, tuple[Section, str]]:
    """Return the settings of `preferences`, `distill` and `grpo` that are not at their defaults."""
    sections = {"preferences": run.preferences, "distill": run.distill, "grpo": run.grpo}
    return {
        f"{name}.{key}": (section, key)
        for name, section in sections.items()
        for key, field in type(section).model_fields.items()
        if getattr(section, key) != field.default
    }


def _fault_of_rounds(run: RunConfig) -> str | None:
    """Return why a run cannot train on sampled answers as its settings say. Not a validator: a
    stage reads some of these sections alone."""
    objective, most = run.train.objective, run.answers.max_new_tokens
    if not run.samples:
        if REWARD in run.evaluate.require:
            return f"rewards.functions = {{}}: evaluate.require names {REWARD}. {NO_REWARD}"
        if run.answers.round > 1:
            return f"rewards.functions = {{}}: rounds are set. {NO_REWARD}"
        if needs_of(objective).examples == "groups":
            return (
                f"rewards.functions = {{}}: train.objective = {objective} trains on sampled "
                f"answers. {NO_REWARD}, and take another objective"
            )
    elif objective not in SAMPLING:
        return (
            f"rewards.functions: train.objective = {objective} does not train on sampled answers. "
            f"Set one of {', '.join(SAMPLING)}, or remove the functions"
        )
    elif not run.answers.prompts_per_round:
        return "answers.prompts_per_round = 0: a round trains on prompts. Set at least 1"
    elif most >= run.data.seq_len:
        return (
            f"answers.max_new_tokens = {most}: a row has data.seq_len = {run.data.seq_len} tokens, "
            "prompt included. Lower it, or raise data.seq_len"
        )
    return None


def _unread_settings(
    document: Mapping[str, object], config: Config, runs: Mapping[str, RunConfig]
) -> list[str]:
    """Return a line for each setting that no objective reads (of a run its own, of all runs the
    shared ones), and for each run that cannot train on sampled answers."""
    lines = []
    if config.answers != AnswersConfig() and not any(run.samples for run in runs.values()):
        lines.append(f"rewards.functions = {{}}: answers are set. {NO_REWARD}.")
    for name, run in runs.items():
        if fault := _fault_of_rounds(run):
            lines.append(f"runs.{name}.{fault}.")
    objectives = {run.train.objective for run in runs.values()}
    for setting, (section, key) in _objective_settings(config).items():
        if not objectives & {*readers_of(setting)}:
            names = ", ".join(sorted(objectives))
            lines.append(_unread(setting, getattr(section, key), f"no run ({names}) reads it"))
    for name, override in config.runs.items():
        objective = runs[name].train.objective
        for setting, (section, key) in _objective_settings(runs[name]).items():
            is_own = key in ((override or {}).get(setting.partition(".")[0]) or {})
            if is_own and setting not in needs_of(objective).settings:
                why = f"train.objective = {objective} does not read it"
                lines.append(_unread(f"runs.{name}.{setting}", getattr(section, key), why))
    return lines


def _unread(setting: str, value: object, why: str) -> str:
    readers = ", ".join(readers_of(".".join(setting.split(".")[-2:])))
    return f"{setting} = {value}: {why}. Remove it, or set train.objective to {readers}."


def _with_objective_defaults(run: RunConfig) -> RunConfig:
    """Return a run with the shared settings that its objective does not read at their defaults."""
    read = needs_of(run.train.objective).settings
    update: dict[str, dict[str, Any]] = {"preferences": {}, "distill": {}, "grpo": {}}
    for setting, (section, key) in _objective_settings(run).items():
        if setting not in read:
            update[setting.partition(".")[0]][key] = type(section).model_fields[key].default
    changed = {name: getattr(run, name).model_copy(update=keys) for name, keys in update.items()}
    return run.model_copy(update=changed)


def validated(
    model: type[SectionT],
    document: Mapping[str, object],
    *,
    prefix: str = "",
    headline: str = NOT_VALID,
) -> SectionT:
    """Return the settings in a parsed document. prefix: of their names; headline: the first line of
    the `UserError` that names each wrong one."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines = [prefix + line for line in explain(model, document, error)]
        raise UserError("\n  ".join([headline, *lines])) from None


def is_hub_id(source: str) -> bool:
    """Tell whether `source` names a hub repository: `owner/name`, without such a path here."""
    return MODEL_ID.fullmatch(source) is not None and not path_exists(source)


def path_exists(path: str) -> bool:
    """Tell whether this user can see this file or folder; false for an impossible name."""
    try:
        return Path(path).exists()
    except OSError:
        return False

"""The cases of the benchmark: a list in YAML, chosen by the settings, each with every number of
processes.

A case is data: a name and the settings that differ. It becomes a `Request`, which names all that a
measurement depends on but the machine.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from workflow.lib.data.reading.sources import unexpanded
from workflow.lib.model.architecture.config_file import read_bounded, text_part
from workflow.lib.model.architecture.shipped_shapes import known_config, nearest_models
from workflow.lib.settings.benchmark import BenchmarkConfig
from workflow.lib.settings.config import NOT_VALID, RunConfig, load_config, merge
from workflow.lib.settings.errors_in_words import explain
from workflow.lib.settings.section_base import Section
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import short_hash

SHIPPED = Path(__file__).parents[2] / "resources" / "benchmark" / "cases.yaml"
# What a case cannot change, because it decides which cases there are.
CHOICE = frozenset({"cases", "cases_file", "peers", "processes", "device"})
# On the CPU, where nothing says how many: the least that shards.
CPU_PROCESSES = 2


class PeerSettings(Section):
    """How another stack does the same work."""

    strategy: Literal["ddp", "fsdp1", "fsdp2"]
    """Who holds what: replicas, or shards."""
    liger: bool = False
    """Liger's fused kernels."""
    checkpointing: bool = True
    """Recomputation of every layer."""


class CaseEntry(Section):
    """An entry of the list of cases."""

    title: str = Field("", max_length=200)
    """What it is, for people."""
    settings: dict[str, Any] = Field(default={})
    """Settings of a run that differ."""
    benchmark: dict[str, Any] = Field(default={})
    """Settings of the benchmark that differ for this case."""
    peer: PeerSettings | None = None
    """In place of `settings`: other software."""


@dataclass(frozen=True)
class Request:
    """One measurement to be made."""

    name: str
    title: str
    processes: int
    sizes: BenchmarkConfig
    """The benchmark's settings with the case's own laid over them."""
    settings: Mapping[str, Any]
    peer: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        """Name of its file."""
        return f"{self.name}-x{self.processes}"

    def document(self) -> dict[str, Any]:
        """Return all that it depends on but the machine, as JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "processes": self.processes,
            "sizes": self.sizes.model_dump(mode="json", exclude=set(CHOICE - {"device"})),
            "settings": dict(self.settings),
            "peer": None if self.peer is None else dict(self.peer),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Request":
        """Return the request that `document` describes."""
        sizes = BenchmarkConfig.model_validate(document["sizes"])
        return cls(**(dict(document) | {"sizes": sizes}))


def requests(benchmark: BenchmarkConfig, *, num_gpus: int) -> list[Request]:
    """Return what is to be measured, in order; num_gpus: those that this machine shows.

    Raises `UserError` for an unknown case, and for a list of cases that cannot be read.
    """
    entries = read_cases(benchmark.cases_file)
    names = _chosen(benchmark, entries)
    return [
        _request(name, entries[name], benchmark, processes=count)
        for name in names
        for count in process_counts(benchmark, num_gpus=num_gpus)
    ]


def process_counts(benchmark: BenchmarkConfig, *, num_gpus: int) -> list[int]:
    """Return the numbers of processes that every case is measured with."""
    if benchmark.processes != "auto":
        return list(dict.fromkeys(benchmark.processes))
    return [num_gpus if on_gpus(benchmark, num_gpus=num_gpus) else CPU_PROCESSES]


def on_gpus(benchmark: BenchmarkConfig, *, num_gpus: int) -> bool:
    """Whether the benchmark runs on GPUs."""
    return benchmark.device == "auto" and num_gpus > 0


def benchmark_folder(benchmark: BenchmarkConfig) -> str:
    """Return the name of the folder of results: the model, and a key of all sizes that the cases
    share.
    """
    shared = benchmark.model_dump(mode="json", exclude=set(CHOICE - {"device"}))
    model = Path(benchmark.model).name.lower()
    return f"{model}-{short_hash(shared)}"


def read_cases(path: str | None) -> dict[str, CaseEntry]:
    """Return the entries of a list of cases by name (None: the shipped one); raises `UserError` if
    it cannot be read.
    """
    file = SHIPPED if path is None else Path(path)
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = f"it cannot be read as YAML ({error})"
        change = unexpanded(str(file)) + "Correct the file"
        raise setting_error("benchmark.cases_file", str(file), reason, change) from None
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise setting_error(
            "benchmark.cases_file",
            str(file),
            "it is no mapping of cases by name",
            "See the shipped one",
        )
    return {name: _entry(name, entry, file) for name, entry in document.items()}


def _entry(name: str, entry: Any, file: Path) -> CaseEntry:
    document = entry if isinstance(entry, dict) else {}
    try:
        case = CaseEntry.model_validate(document)
    except ValidationError as error:
        lines = explain(CaseEntry, document, error)
        raise UserError(f"case {name} of {file}:\n  " + "\n  ".join(lines)) from None
    wrong = sorted(CHOICE & case.benchmark.keys())
    if wrong:
        raise UserError(
            f"case {name} of {file}: benchmark.{wrong[0]} is not a case's own. Remove it."
        )
    return case


def _chosen(benchmark: BenchmarkConfig, entries: Mapping[str, CaseEntry]) -> list[str]:
    peers = [name for name, entry in entries.items() if entry.peer is not None]
    if benchmark.cases == "all":
        return [name for name in entries if benchmark.peers or name not in peers]
    for name in benchmark.cases:
        if name not in entries:
            near = difflib.get_close_matches(name, entries, n=3, cutoff=0.3) or list(entries)
            raise setting_error(
                "benchmark.cases",
                name,
                "there is no case of this name",
                f"Did you mean {', '.join(near)}",
            )
    return list(dict.fromkeys([*benchmark.cases, *(peers if benchmark.peers else [])]))


def _request(name: str, entry: CaseEntry, benchmark: BenchmarkConfig, *, processes: int) -> Request:
    document = merge(benchmark.model_dump(mode="json"), entry.benchmark)
    try:
        sizes = BenchmarkConfig.model_validate(document)
    except ValidationError as error:
        lines = explain(BenchmarkConfig, document, error)
        raise UserError(f"case {name}: benchmark." + "; benchmark.".join(lines)) from None
    peer = None if entry.peer is None else entry.peer.model_dump(mode="json")
    return Request(name, entry.title, processes, sizes, entry.settings, peer)


def run_settings(request: Request, *, device: str) -> RunConfig:
    """Return the settings of the run that a request measures; raises `UserError` for one that no
    run may have.
    """
    sizes, count = request.sizes, request.processes
    document: dict[str, Any] = {
        "data": {"seq_len": sizes.seq_len},
        "lora": {"r": sizes.rank, "alpha": 2 * sizes.rank},
        "train": {
            "epochs": None,
            "max_steps": sizes.steps,
            "global_batch_size": count * sizes.micro_batch_size * sizes.accumulation,
            "micro_batch_size": sizes.micro_batch_size,
            "activation_checkpointing": True,
            "learning_rate": 1e-4,
        },
        # What preflight would choose is not what a case measures: it names every lever.
        "hardware": {
            "offload_activations": False,
            "offload_layers": 0,
            "reshard_after_forward": True,
        }
        | ({"gpus": count} if device == "cuda" else {"gpus": 0, "cpu_processes": count}),
    }
    try:
        return load_config(merge(document, request.settings) | {"runs": {"case": {}}})[1]["case"]
    except UserError as error:
        reason = str(error).removeprefix(NOT_VALID).strip()
        raise UserError(f"case {request.name}: {reason}") from None


def model_config(sizes: BenchmarkConfig) -> dict[str, Any]:
    """Return the config.json of the measured shape: of a multimodal model, that of its decoder,
    since random bases hold no other part. Raises `UserError` if there is no such model.
    """
    path = Path(sizes.model) / "config.json"
    config = read_bounded(path) if path.is_file() else known_config(sizes.model)
    if config is None:
        near = nearest_models(sizes.model)
        change = f"Did you mean {', '.join(near)}" if near else "Give a folder with a config.json"
        reason = "neither a folder with a config.json nor the name of a shipped shape"
        raise setting_error(
            "benchmark.model", sizes.model, reason, unexpanded(sizes.model) + change
        )
    decoder = text_part(config)
    changed = {"num_hidden_layers": sizes.layers, "vocab_size": sizes.vocab_size}
    changed |= _first_layers(decoder, sizes.layers)
    return decoder | {key: value for key, value in changed.items() if value is not None}


def _first_layers(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the entries of a config.json that name the kind of every layer, for the first ones."""
    whole = config.get("num_hidden_layers")
    named = {key: value for key, value in config.items() if isinstance(value, list | str)}
    return {key: value[:layers] for key, value in named.items() if len(value) == whole}

"""The cases of the benchmark: a list in YAML, selected by the settings, each with every number of
processes.

A case is data: a name and the settings that differ. It becomes a `Request` with all that a
measurement depends on, except the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from workflow.benchmark.random_pairs import packed, random_pairs
from workflow.lib.checkpoints.files.config_file import read_bounded, text_part
from workflow.lib.data.reading.sources import unexpanded
from workflow.lib.model.architecture.shipped_shapes import known_config, nearest_models
from workflow.lib.settings.config import NOT_VALID, RunConfig, load_config, validated
from workflow.lib.settings.overrides import merge
from workflow.lib.settings.section_base import Name, Section
from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.step_plan.memory_options import unsearched_settings
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.near_names import near_names

SHIPPED = Path(__file__).parents[1] / "resources" / "benchmark" / "cases.yaml"
# Settings that a case cannot change, because they select the cases.
CHOICE = frozenset({"cases", "cases_file", "peers", "processes", "device"})
CPU_PROCESSES = 2  # the least number with shards


class BenchmarkConfig(Section):
    """Shape, batch, and the cases that are measured; section `benchmark` of a settings file."""

    model: str = Field("workflow/resources/base", min_length=1)
    """Shape of the model: a shipped one (`meta-llama/Llama-2-70b-hf`), or a folder with a
    config.json. Its weights are random: speed and memory do not depend on them."""
    layers: int | None = Field(None, ge=1, le=4096)
    """Decoder layers; null = as many as the model has."""
    vocab_size: int | None = Field(None, ge=2, le=2**24)
    """Rows of embedding and head; null = as many as the model has."""
    seq_len: int = Field(256, ge=8, le=2**20)
    """Length of a row, tokens."""
    micro_batch_size: int = Field(2, ge=1, le=2**20)
    """Rows per process and forward pass."""
    accumulation: int = Field(1, ge=1, le=2**16)
    """Micro-batches of a step."""
    documents: int = Field(1, ge=1, le=2**19)
    """Documents packed into a row, each of at least 4 tokens."""
    pairs: int | None = Field(None, ge=1, le=2**16)
    """Pairs of a step, of drawn lengths, packed into rows (`train.objective: dpo` and the like);
    they replace `accumulation` and `documents`. null = no pairs."""
    groups: int | None = Field(None, ge=1, le=2**16)
    """Groups of a step, a row each (`train.objective: grpo`): 8 answers of seq_len / 24 tokens to a
    prompt of seq_len / 12; they replace the same. null = no groups."""
    rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapter, on all linear layers."""
    steps: int = Field(6, ge=1, le=10_000)
    """Optimizer steps of a case; speed is that of the last two thirds, without the last."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto` = the GPUs, if any is visible."""
    processes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] | Literal["auto"] = "auto"
    """Numbers of processes that every case is measured with; `auto` = all GPUs, or 2 on a CPU."""
    memory_cap_gib: float | None = Field(None, gt=0.0, le=4096.0)
    """What PyTorch may reserve of each GPU, GiB, to emulate a smaller card; null = all of it. CUDA
    and NCCL take 0.8 to 1.6 GiB beside it."""
    check_bytes: bool = True
    """Run the checks of a training run before the first step."""
    cases: tuple[Name, ...] | Literal["all"] = (
        "fsdp",
        "checkpointing",
        "flash",
        "no_recomputation",
    )
    """Cases of the list by name, in this order."""
    cases_file: str | None = Field(None, min_length=1)
    """The list of cases; null = `workflow/resources/benchmark/cases.yaml`."""
    peers: bool = False
    """Also measure the other software of the list (`envs/peers.txt`, `envs/unsloth.txt`)."""

    @model_validator(mode="after")
    def _sizes(self) -> "BenchmarkConfig":
        if self.documents > self.seq_len // 4:
            raise ValueError(
                f"documents = {self.documents}: a row of seq_len = {self.seq_len} tokens holds at "
                f"most {self.seq_len // 4}. Lower it"
            )
        for name, all_of_them in (("processes", "auto"), ("cases", "all")):
            if not getattr(self, name):
                raise ValueError(f"{name} = []: there is nothing to measure. Set {all_of_them}")
        return self


class PeerSettings(Section):
    """The same work by other software."""

    software: Literal["trl", "unsloth"] = "trl"
    """`unsloth` trains by TRL's SFTTrainer, too, which it patches; rows alone, no shards."""
    strategy: Literal["ddp", "fsdp1", "fsdp2"]
    liger: bool = False
    """Liger's fused kernels."""
    checkpointing: bool = True
    """Recomputation of every layer."""
    pairs: int = Field(1, ge=1, le=2**16)
    """Pairs of a micro-batch, where the case has pairs."""
    answers: int = Field(1, ge=1, le=2**16)
    """Answers of a micro-batch, where the case has groups."""
    by_length: bool = False
    """Pairs in the order of their lengths, which leaves the least padding."""
    stored_reference: bool = True
    """Of pairs: the reference's log-probabilities are computed before the first step, not in each,
    as TRL does by default."""

    @model_validator(mode="after")
    def _unsloth_alone(self) -> "PeerSettings":
        if self.software == "unsloth" and (self.strategy != "ddp" or self.liger):
            raise ValueError(
                f"strategy = {self.strategy}, liger = {self.liger}: unsloth has kernels of its "
                "own and takes a whole model on each GPU. Set strategy: ddp and liger: false"
            )
        return self


class CaseEntry(Section):
    """An entry of the list of cases."""

    title: str = Field("", max_length=200)
    settings: dict[str, Any] = Field(default={})
    """Settings of a run that differ."""
    benchmark: dict[str, Any] = Field(default={})
    """Settings of the benchmark that differ for this case."""
    peer: PeerSettings | None = None
    """In place of `settings`: other software."""


@dataclass(frozen=True)
class Request:
    """A requested measurement."""

    name: str
    title: str
    processes: int
    sizes: BenchmarkConfig  # the benchmark's settings, overridden by the case's
    settings: Mapping[str, Any]
    peer: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        """Name of the case, and its processes."""
        return f"{self.name}-x{self.processes}"

    def document(self) -> dict[str, Any]:
        """Return everything that the measurement depends on, except the machine, as JSON."""
        return {
            "case": self.name,
            "title": self.title,
            "processes": self.processes,
            "sizes": self.sizes.model_dump(mode="json", exclude=set(CHOICE - {"device"})),
            "settings": dict(self.settings),
            "peer": None if self.peer is None else dict(self.peer),
        }


def load_benchmark(document: Mapping[str, object]) -> BenchmarkConfig:
    """Return the section `benchmark` of a settings file, which has no other; raises `UserError`."""
    if unknown := sorted(map(str, document.keys() - {"benchmark"})):
        raise setting_error(
            unknown[0], str(document[unknown[0]])[:80], "the benchmark reads section `benchmark`",
            "Remove it",
        )  # fmt: skip
    section: Any = document.get("benchmark") or {}
    return validated(BenchmarkConfig, section, prefix="benchmark.")


def requests(benchmark: BenchmarkConfig, *, num_gpus: int) -> list[Request]:
    """Return the requested measurements, in order; num_gpus: visible here. Raises `UserError` for
    an unknown case, and for a list of cases that cannot be read."""
    entries = read_cases(benchmark.cases_file)
    on_gpus = benchmark.device == "auto" and num_gpus > 0
    counts = benchmark.processes
    if counts == "auto":
        counts = (num_gpus if on_gpus else CPU_PROCESSES,)
    return [
        _request(name, entries[name], benchmark, processes=count)
        for name in _chosen(benchmark, entries)
        for count in dict.fromkeys(counts)
    ]


def read_cases(path: str | None) -> dict[str, CaseEntry]:
    """Return the cases of a list by name (None: the shipped one), or raise `UserError`."""
    file = SHIPPED if path is None else Path(path)
    document = read_mapping(file)
    return {name: _entry(name, entry, file) for name, entry in document.items()}


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file, or raise `UserError`."""
    check_yaml(file)
    document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise UserError(f"{file}: it is no mapping by name. See those of {SHIPPED.parent}.")
    return document


def _entry(name: str, entry: Any, file: Path) -> CaseEntry:
    case = validated(CaseEntry, entry or {}, headline=f"case {name} of {file}:")
    forbidden = sorted(CHOICE & case.benchmark.keys())
    if forbidden:
        raise UserError(
            f"case {name} of {file}: benchmark.{forbidden[0]} is not a case's own. Remove it."
        )
    return case


def _chosen(benchmark: BenchmarkConfig, entries: Mapping[str, CaseEntry]) -> list[str]:
    peers = [name for name, entry in entries.items() if entry.peer is not None]
    if benchmark.cases == "all":
        return [name for name in entries if benchmark.peers or name not in peers]
    for name in benchmark.cases:
        if name not in entries:
            near = near_names(name, entries, count=3) or list(entries)
            raise setting_error(
                "benchmark.cases",
                name,
                "there is no case of this name",
                f"Did you mean {', '.join(near)}",
            )
    return list(dict.fromkeys([*benchmark.cases, *(peers if benchmark.peers else [])]))


def _request(name: str, entry: CaseEntry, benchmark: BenchmarkConfig, *, processes: int) -> Request:
    document = merge(benchmark.model_dump(mode="json"), entry.benchmark)
    sizes = validated(BenchmarkConfig, document, prefix="benchmark.", headline=f"case {name}:")
    peer = None if entry.peer is None else entry.peer.model_dump(mode="json")
    return Request(name, entry.title, processes, sizes, entry.settings, peer)


def step_rows(sizes: BenchmarkConfig, *, processes: int) -> int:
    """Return the rows of a step."""
    if sizes.groups is not None:
        return sizes.groups
    if sizes.pairs is None:
        return processes * sizes.micro_batch_size * sizes.accumulation
    # Lengths of pairs do not depend on the vocabulary.
    pairs = random_pairs(sizes.pairs, seq_len=sizes.seq_len, vocab_size=2)
    return packed(pairs, seq_len=sizes.seq_len).num_rows


def run_settings(request: Request, *, device: str, gpu_model: str | None = None) -> RunConfig:
    """Return the settings of a request's run, on GPUs of a named model where none is visible;
    raises `UserError` for an impossible one."""
    sizes, count = request.sizes, request.processes
    sharing = request.settings.get("hardware", {}).get("context_parallel", 1)
    if sharing == "auto":
        bound = "a case does not measure the choices of preflight"
        raise setting_error("hardware.context_parallel", sharing, bound, "Set it to a number")
    document: dict[str, Any] = {
        "data": {"seq_len": sizes.seq_len},
        "lora": {"r": sizes.rank, "alpha": 2 * sizes.rank},
        "train": {
            "epochs": None,
            "max_steps": sizes.steps,
            "global_batch_size": step_rows(sizes, processes=count // sharing),
            "micro_batch_size": sizes.micro_batch_size,
            "learning_rate": 1e-4,
        },
        "hardware": {"context_parallel": 1}
        | (
            {"gpus": count, "gpu_model": gpu_model}
            if device == "cuda"
            else {"gpus": 0, "cpu_processes": count}
        ),
    }
    # A case does not measure the choices of preflight.
    document = merge(unsearched_settings(), document)
    try:
        return load_config(merge(document, request.settings) | {"runs": {"case": {}}})[1]["case"]
    except UserError as error:
        reason = str(error).removeprefix(NOT_VALID).strip()
        raise UserError(f"case {request.name}: {reason}") from None


def model_config(sizes: BenchmarkConfig) -> dict[str, Any]:
    """Return the config.json of the measured decoder; raises `UserError` if there is none."""
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
    if (context := decoder.get("max_position_embeddings")) and context < sizes.seq_len:
        changed["max_position_embeddings"] = sizes.seq_len  # of random weights any is as good
    changed |= _first_layers(decoder, sizes.layers)
    return decoder | {key: value for key, value in changed.items() if value is not None}


def _first_layers(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the entries of a config.json with the kind of every layer, for the first ones."""
    num_layers = config.get("num_hidden_layers")
    sized = {key: value for key, value in config.items() if isinstance(value, list | str)}
    return {key: value[:layers] for key, value in sized.items() if len(value) == num_layers}

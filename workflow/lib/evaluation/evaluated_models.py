"""The evaluated models, each loaded from its files if a part of its evaluation is not archived.

NF4 base and tuned are one copy of the weights with the adapter switched off and on, and so are the
original and the adapter on it. Only one copy is in memory: a model replaces the one before it."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Quantization
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.heartbeat import FIRST_PASS_S, Pulse
from workflow.lib.distributed.work_sharing import (
    check_recorded,
    is_sharded,
    progress_of,
    shared_out,
)
from workflow.lib.distributed.world import World
from workflow.lib.evaluation.questions import Model, Subject, content_key
from workflow.lib.export.sharded_models import load_sharded_adapter, load_sharded_base
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.scores.streamed_model import StreamedModel
from workflow.lib.settings.forms import FORMS, Form, SubjectName
from workflow.lib.system.checksums import RecordedFile, downloaded_files, listed_files
from workflow.lib.system.files import SUMS, file_sha256, package_versions

Opened = Model | StreamedModel
SCORING_S = 1800.0  # between two forward passes: requests are made, or answers judged

SETTINGS_FILES = ("config.json", "generation_config.json", "adapter_config.json")
# Installed packages that compute the numbers.
MEASURING = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn")


def machine_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return as JSON all that numbers depend on besides model and question; not the processes."""
    return {
        "device": options["device"].type,
        "compute_dtype": str(options["compute_dtype"]).removeprefix("torch."),
        "attention": options["attention"],
        "packages": {k: v for k, v in package_versions().items() if k in MEASURING},
    }


def source_files(folder: Path, *, world: World | None = None) -> list[RecordedFile]:
    """Return the original's files that its numbers depend on, with their SHA-256. Collective. A
    download's files are compared with its record; a user's own are hashed now. Raises `UserError`
    if one is damaged."""
    recorded = [file for file in downloaded_files(folder) if _counts(file.name)]
    if recorded:
        check_recorded(recorded, world=world)
        return recorded
    paths = sorted(path for path in folder.iterdir() if _counts(path.name))
    digest = partial(file_sha256, on_progress=progress_of(world))
    hashes = shared_out(paths, lambda mine: [*map(digest, mine)], world=world)
    return [RecordedFile(folder, p.name, sha) for p, sha in zip(paths, hashes, strict=True)]


def files_of(folder: Path) -> list[RecordedFile]:
    """Return a folder's files that its numbers depend on: those of its checksums, or of an adapter
    without any as they are now."""
    if (folder / SUMS).is_file():
        return listed_files(folder)
    names = sorted(path.name for path in folder.iterdir() if _counts(path.name))
    return [RecordedFile(folder, name, file_sha256(folder / name)) for name in names]


def _counts(name: str) -> bool:
    """Tell whether a file holds weights, or settings of a model, its generation or an adapter."""
    return name in SETTINGS_FILES or name.endswith(".safetensors")


def subjects(
    names: Collection[SubjectName],
    folders: Mapping[str, Path],
    *,
    options: dict[str, Any],
    sources: Sequence[RecordedFile] = (),
    shards: World | None = None,
    streamed: bool = False,
) -> list[Subject]:
    """Return the named subjects, in the best order of loading; nothing is loaded yet. folders: by
    the names of `forms.FOLDERS`; options: of `load_options`; sources: `source_files` of the
    original, if it is measured; shards: the processes over which the weights are sharded, None for
    a whole copy; streamed: the original is larger than memory. Raises `UserError` if a folder is
    not finished."""
    loading, memory = Loading(options, shards), _Memory()
    # A base in 16 bits is the original: what is measured of one is known of the other.
    equal = {"model": "base"} if _is_original(folders, sources) else {}
    parts = {name: [equal.get(part, part) for part in FORMS[name].parts] for name in names}
    files = {part: _files(part, folders[part], sources) for part in {*chain(*parts.values())}}
    copies: dict[tuple[str, ...], list[SubjectName]] = {}
    for name in (name for name in FORMS if name in names):
        copy = tuple(equal.get(part, part) for part in _copy(FORMS[name]))
        copies.setdefault(copy, []).append(name)
    measured = []
    for copy, forms in copies.items():
        weights, *adapters = (folders[part] for part in copy)
        load = partial(loading.model, Checkpoint(weights), *map(Adapter, adapters))
        opener = memory.opener(load)
        for name in forms:
            opened: Callable[[], AbstractContextManager[Opened]]
            opened = partial(opener, adapter=FORMS[name].adapter is not None)
            is_streamed = streamed and name == "original" and not equal
            if is_streamed:
                opened = partial(_streamed, folders["model"], options)
            key = content_key(*(files[part] for part in parts[name]))
            measured.append(Subject(name, key, opened, streamed=is_streamed))
    return measured


def _is_original(folders: Mapping[str, Path], sources: Sequence[RecordedFile]) -> bool:
    """Tell whether the base has the weights of the measured original, all in 16 bits."""
    path = folders.get("base", Path()) / "quantization.json"
    weights = {x.name: x.sha256 for x in sources if x.name.endswith(".safetensors")}
    if not weights or not path.is_file():
        return False
    record = read_record(path, Quantization)
    return record.method == "none" and record.model_files == weights


def _copy(form: Form) -> tuple[str, ...]:
    """Return the folders of the copy in memory: with the adapter, off, of weights that have one."""
    has_adapter = any(f.weights == form.weights and f.adapter == "adapter" for f in FORMS.values())
    return (form.weights, "adapter") if form.adapter is None and has_adapter else form.parts


def _files(part: str, folder: Path, sources: Sequence[RecordedFile]) -> Sequence[RecordedFile]:
    if part == "model":
        return sources
    return files_of(folder) if part == "start" else listed_files(folder)


@contextmanager
def _streamed(folder: Path, options: dict[str, Any]) -> Iterator[StreamedModel]:
    yield StreamedModel(
        Checkpoint(folder),
        device=options["device"],
        dtype=options["compute_dtype"],
        attention=options["attention"],
    )


def watched(subject: Subject, *, pulse: Pulse, folders: Sequence[Path]) -> Subject:
    """Return the subject whose loading (from some of `folders`) and forward passes beat `pulse`."""
    files = [path for folder in folders for path in folder.glob("*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in files)

    @contextmanager
    def opened() -> Iterator[Opened]:
        pulse.phase(f"loading {subject.name}", num_bytes=num_bytes, least_s=FIRST_PASS_S)
        with subject.opened() as model:
            pulse.phase(f"measuring {subject.name}", least_s=SCORING_S)
            if isinstance(model, StreamedModel):
                model.moved = pulse.moved
                yield model
                return
            # of the inner model: generation bypasses PEFT's wrapper
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            hook = inner.register_forward_pre_hook(pulse.moved)
            try:
                yield model
            finally:
                hook.remove()

    return replace(subject, opened=opened)


@dataclass(frozen=True)
class Loading:
    """The loading of models: whole on a device, or sliced over processes."""

    options: dict[str, Any]
    shards: World | None

    def model(self, weights: Checkpoint, adapter: Adapter | None = None) -> Model:
        """Load a model's weights, with an adapter on them."""
        return self.plain(weights) if adapter is None else self.tuned(weights, adapter)

    def plain(self, checkpoint: Checkpoint) -> PreTrainedModel:
        if self.shards is None:
            return load_base(checkpoint, **self.options)
        return load_sharded_base(checkpoint, world=self.shards, **self._computing)

    def tuned(self, base: Checkpoint, adapter: Adapter) -> PeftModel:
        if self.shards is None:
            return load_adapter(load_base(base, **self.options), adapter)
        return load_sharded_adapter(base, adapter, world=self.shards, **self._computing)

    @property
    def _computing(self) -> dict[str, Any]:
        """The options without the device: processes that share the weights set it."""
        return {name: value for name, value in self.options.items() if name != "device"}


class _Memory:
    """The one loaded model; another replaces it."""

    def __init__(self) -> None:
        self._load: Callable[[], Model] | None = None
        self._model: Model | None = None

    def opener(self, load: Callable[[], Model]) -> Callable[..., AbstractContextManager[Model]]:
        @contextmanager
        def opened(*, adapter: bool = True) -> Iterator[Model]:
            model = self._loaded(load)
            if not isinstance(model, PeftModel):
                yield model
                return
            with nullcontext() if adapter else model.disable_adapter():
                # PEFT's wrapper would bypass the hooks of FSDP, and it accepts any module
                inner: PreTrainedModel = model.get_base_model()  # type: ignore[assignment]
                yield inner if is_sharded(inner) else model

        return opened

    def _loaded(self, load: Callable[[], Model]) -> Model:
        if self._model is None or self._load is not load:
            self._model = None  # freed before the next one comes
            gc.collect()
            torch.cuda.empty_cache()
            self._model, self._load = load(), load
        return self._model

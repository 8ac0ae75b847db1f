"""The models that are evaluated, each loaded from exported files when a part of its evaluation is
not archived yet.

Base and tuned are one copy of the weights with the adapter switched off and on. The merged model
takes the place of that copy.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from workflow.lib.distributed.heartbeat import FIRST_PASS_S, Pulse
from workflow.lib.distributed.work_sharing import is_sharded
from workflow.lib.distributed.world import World
from workflow.lib.evaluation.measurement_cache import content_key
from workflow.lib.evaluation.questions import Model, Subject
from workflow.lib.export.sharded_models import load_sharded_adapter, load_sharded_base
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.architecture.attention_needs import read_attention_needs
from workflow.lib.model.backends import resolve_attention, resolve_dtype
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.files import package_versions

SCORING_S = 1800.0  # between two forward passes: a task's requests are made, or its answers judged

# Of the installed packages, those that compute the numbers.
MEASURING = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn")


def load_options(base: Path, *, device: torch.device, settings: ModelConfig) -> dict[str, Any]:
    """Return how models are loaded on `device`: the keyword arguments of
    `stock_models.load_base`.
    """
    dtype = resolve_dtype(settings.compute_dtype, device)
    attention = resolve_attention(
        settings.attention, device, read_attention_needs(base), compute_dtype=dtype
    )
    return {"device": device, "compute_dtype": dtype, "attention": attention}


def machine_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return what every number depends on besides model and question, as JSON; the number of
    processes is not in it.
    """
    return {
        "device": options["device"].type,
        "compute_dtype": str(options["compute_dtype"]).removeprefix("torch."),
        "attention": options["attention"],
        "packages": {k: v for k, v in package_versions().items() if k in MEASURING},
    }


def subjects(
    *,
    base: Path,
    adapter: Path,
    merged: Path | None,
    options: dict[str, Any],
    shards: World | None = None,
) -> list[Subject]:
    """Return base, tuned and, if there is one, merged, in this order; nothing is loaded yet.

    options: of `load_options`; shards: the processes over which the weights are sharded, None for a
    whole copy.
    Raises `UserError` if a folder is not finished.
    """

    def load_tuned() -> PeftModel:
        if shards is None:
            return load_adapter(load_base(base, **options), adapter)
        return load_sharded_adapter(base, adapter, world=shards, **_computing(options))

    def load_merged(folder: Path) -> PreTrainedModel:
        if shards is None:
            return load_base(folder, **options)
        return load_sharded_base(folder, world=shards, **_computing(options))

    tuned = _Loaded(load_tuned)
    models = [
        Subject("base", content_key(base), tuned.with_adapter_off),
        Subject("tuned", content_key(base, adapter), tuned.opened),
    ]
    if merged is not None:

        @contextmanager
        def opened() -> Iterator[Model]:
            tuned.release()
            yield load_merged(merged)

        models.append(Subject("merged", content_key(merged), opened))
    return models


def watched(subject: Subject, *, pulse: Pulse, folders: Sequence[Path]) -> Subject:
    """Return the subject, with what happens to it told to `pulse`: that it is loaded (from some of
    `folders`), and every forward pass.
    """
    files = [path for folder in folders for path in folder.glob("*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in files)

    @contextmanager
    def opened() -> Iterator[Model]:
        pulse.phase(f"loading {subject.name}", num_bytes=num_bytes, least_s=FIRST_PASS_S)
        with subject.opened() as model:
            pulse.phase(f"measuring {subject.name}", least_s=SCORING_S)
            # of the model inside: PEFT's own wrapper is not called when it generates
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            hook = inner.register_forward_pre_hook(pulse.moved)
            try:
                yield model
            finally:
                hook.remove()

    return replace(subject, opened=opened)


def _computing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the load options but the device, which processes that share the weights know."""
    return {name: value for name, value in options.items() if name != "device"}


def _called(tuned: PeftModel) -> Model:
    """Return what is called for a forward. PEFT's wrapper would go past the hooks by which FSDP
    gathers weights.
    """
    # PEFT declares any module
    inner: PreTrainedModel = tuned.get_base_model()  # type: ignore[assignment]
    return inner if is_sharded(inner) else tuned


class _Loaded:
    """A tuned model that is loaded at its first use and stays until it is released."""

    def __init__(self, load: Callable[[], PeftModel]) -> None:
        self._load = load
        self._model: PeftModel | None = None

    @contextmanager
    def opened(self) -> Iterator[Model]:
        """Yield the model with its adapter on."""
        yield _called(self._tuned())

    @contextmanager
    def with_adapter_off(self) -> Iterator[Model]:
        """Yield the model with its adapter off."""
        tuned = self._tuned()
        with tuned.disable_adapter():
            yield _called(tuned)

    def _tuned(self) -> PeftModel:
        if self._model is None:
            self._model = self._load()
        return self._model

    def release(self) -> None:
        """Free the model's memory."""
        self._model = None
        gc.collect()
        torch.cuda.empty_cache()

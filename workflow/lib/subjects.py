"""The models that are evaluated, each loaded from exported files when a part of its evaluation is not archived yet.

Base and tuned are one copy of the weights with the adapter switched off and on. The merged model takes the
place of that copy.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from workflow.lib.archive import content_key
from workflow.lib.artifacts import package_versions
from workflow.lib.config import ModelConfig
from workflow.lib.evaluation import Model, Subject
from workflow.lib.inference import (
    load_adapter,
    load_base,
    resolve_attention,
    resolve_dtype,
    softcaps_attention,
)

# Of the installed packages, those that compute the numbers.
MEASURING = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn")


def load_options(base: Path, *, device: torch.device, settings: ModelConfig) -> dict[str, Any]:
    """Return how models are loaded on `device`: the keyword arguments of `inference.load_base`."""
    dtype = resolve_dtype(settings.compute_dtype, device)
    attention = resolve_attention(
        settings.attention, device, compute_dtype=dtype, softcapped=softcaps_attention(base)
    )
    return {"device": device, "compute_dtype": dtype, "attention": attention}


def machine_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return what every number depends on besides model and question, as JSON; the number of processes is not in it."""
    return {
        "device": options["device"].type,
        "compute_dtype": str(options["compute_dtype"]).removeprefix("torch."),
        "attention": options["attention"],
        "packages": {k: v for k, v in package_versions().items() if k in MEASURING},
    }


def subjects(
    *, base: Path, adapter: Path, merged: Path | None, options: dict[str, Any]
) -> list[Subject]:
    """Return base, tuned and, if there is one, merged, in this order; nothing is loaded yet.

    options: of `load_options`. Raises `UserError` if a folder is not finished.
    """
    tuned = _Loaded(lambda: load_adapter(load_base(base, **options), adapter))
    found = [
        Subject("base", content_key(base), tuned.with_adapter_off),
        Subject("tuned", content_key(base, adapter), tuned.opened),
    ]
    if merged is not None:

        @contextmanager
        def opened() -> Iterator[Model]:
            tuned.release()
            yield load_base(merged, **options)

        found.append(Subject("merged", content_key(merged), opened))
    return found


class _Loaded:
    """A tuned model that is loaded at its first use and stays until it is released."""

    def __init__(self, load: Callable[[], PeftModel]) -> None:
        self._load = load
        self._model: PeftModel | None = None

    @contextmanager
    def opened(self) -> Iterator[Model]:
        """Yield the model with its adapter on."""
        if self._model is None:
            self._model = self._load()
        yield self._model

    @contextmanager
    def with_adapter_off(self) -> Iterator[Model]:
        """Yield the model with its adapter off."""
        with self.opened() as model:
            assert isinstance(model, PeftModel)
            with model.disable_adapter():
                yield model

    def release(self) -> None:
        """Free the model's memory."""
        self._model = None
        gc.collect()
        torch.cuda.empty_cache()

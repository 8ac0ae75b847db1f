"""The table `workflow/docs/families.csv`, from the table of the tests and from what the engine
makes of each family's tiny model.

`python -m tests.support.families_page` writes it anew."""

from collections.abc import Iterable
from typing import Any

import torch

from tests.support.families import FAMILIES
from tests.support.measurements import all_lines, sizes_of
from tests.support.pages import DOCS, csv_text
from workflow.benchmark.cases import BenchmarkConfig, model_config
from workflow.lib.checkpoints.decoder_layers import (
    decoder_layers,
    drop_other_parts_,
    experts_modules,
)
from workflow.lib.checkpoints.files.attention_needs import attention_needs
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.kernels.attention.attention_choice import automatic_attention
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.prepared_decoder import separate_documents_

TABLE = DOCS / "families.csv"
HEAD = (
    *("family (model_type)", "its tiny model has", "attention", "auto on a GPU", "fused"),
    *("recurrent layers", "memory"),
)
PARTS = {
    "norms": "norms",
    "projections": "projections",
    "rotations": "rotation",
    "recurrences": "recurrence",
    "feed_forwards": "feed-forward",
    "experts": "experts",
}


def measured_families(lines: Iterable[dict[str, Any]]) -> set[str]:
    """Return the families whose memory this engine, not a peer alone, took on GPUs."""
    ours = {sizes_of(line).model for line in lines if line["peer"] is None}
    return {model_config(BenchmarkConfig(model=model))["model_type"] for model in ours}


def table() -> str:
    measured = measured_families(all_lines())
    return csv_text([HEAD, *(_line(family, measured) for family in FAMILIES)])


def _line(family: str, measured: set[str]) -> list[str]:
    config = FAMILIES[family].config(family)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    drop_other_parts_(model)
    layers, fused = len(decoder_layers(model)), fuse_layers_(model)
    recurrent = len(separate_documents_(model, AdapterState()))
    experts = len(list(experts_modules(model)))
    needs = attention_needs(config.to_dict())
    on_gpu = automatic_attention(
        needs, cuda=True, bfloat16=True, compute_dtype="bfloat16", flash_package=False,
        training=True,
    ).name  # fmt: skip
    return [
        FAMILIES[family].model_type or family,
        FAMILIES[family].has,
        _attention(config.get_text_config()) + (", soft-capped" if needs.softcap else ""),
        on_gpu,
        _fused(dict(fused) | {"experts": experts}, layers),
        f"{recurrent} of {layers}" if recurrent else "none",
        "measured" if config.get_text_config().model_type in measured else "predicted only",
    ]


def _attention(config: Any) -> str:
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if "attention" in kind}
    kinds -= {"linear_attention"}
    if not kinds:
        window = getattr(config, "sliding_window", None)
        return "sliding" if window and getattr(config, "use_sliding_window", True) else "full"
    return " and ".join(sorted(kind.removesuffix("_attention") for kind in kinds))


def _fused(counts: dict[str, int], layers: int) -> str:
    """Return which parts are fused, and in how many layers where not in all."""
    parts = []
    for kind, name in PARTS.items():
        count = counts.get(kind, 0)
        if count:
            parts.append(name if count >= layers else f"{name} ({count} of {layers} layers)")
    return ", ".join(parts) or "none"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")

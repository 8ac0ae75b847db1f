"""What a model card is written from, and how text from elsewhere is written in it."""

import html
import re
from dataclasses import dataclass
from typing import Any

from workflow.lib.artifacts.gguf_record import GgufChecks
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.quantization_record import Quantization
from workflow.lib.artifacts.served_record import ServedCheck
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.report.verdict import Measured
from workflow.lib.system.number_formats import visible


@dataclass(frozen=True)
class CardInputs:
    """What a card is written from. `model_id`, `dataset_id`: hub ids or None; `revision`: the
    base's commit; `adapter_config`: PEFT's; `on_original`: PEFT's of what was trained after the
    recovery of the base, None without one; `nf4_base_id`: of the 4-bit base."""

    model_id: str | None
    revision: str | None
    adapter_config: dict[str, Any]
    dataset_id: str | None
    dataset: str
    quantization: Quantization
    summary: Summary
    manifest: Manifest
    parity: Parity
    measured: Measured
    gguf: GgufChecks | None = None
    checked: ServedCheck | None = None
    nf4_base_id: str | None = None
    on_original: dict[str, Any] | None = None

    @property
    def base_name(self) -> str:
        """The base by its hub id, or its label: a path of the machine is nothing to publish."""
        return self.model_id or self.summary.settings.model.name


def text(value: object) -> str:
    """Write text from elsewhere on one line of Markdown: no markup, no cell border, no link."""
    flat = " ".join(visible(str(value)).split())
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", html.escape(flat, quote=False))


def code(value: object) -> str:
    """Write text from elsewhere as code in a line or a table's cell."""
    return f"<code>{text(value)}</code>"

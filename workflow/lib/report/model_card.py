"""The model card (`README.md`) of an exported adapter, in the format of the Hugging Face hub.

Everything in it comes from the artifacts: data and settings of the training, scores against its
base, and open questions. The template `card.md.j2` has the words. Values are escaped for Markdown,
unless a filter has made them markup."""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment
from markupsafe import Markup

from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.records import GgufChecks, Parity, Quantization, ServedCheck
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.files.quantization_settings import TEXT_PART
from workflow.lib.report.html_page import NUMBERS, templates
from workflow.lib.report.run_results import objective_words
from workflow.lib.report.verdict import Measured, label
from workflow.lib.settings.forms import FORMS, TRAINED
from workflow.lib.system.number_formats import probability, visible
from workflow.lib.system.redaction import public_name

NF4_FOLDER = "path/to/nf4/base"  # placeholder for the folder of an unpublished base
OUTCOMES = {
    "improved": "lower than",
    "worsened": "higher than",
    "unclear": "not clearly different from",
    "too few": "of too few documents to be told apart from",
}
# By the direction of a metric's paired interval (`TaskScore.change`).
CHANGES = {
    "better": "Better than the {}, by the 95% interval",
    "worse": "Worse than the {}, by the 95% interval",
    "without a clear change": "No clear change against the {}",
    "of too few items": "Of too few items to show a change against the {}",
    "not judged": "Not judged, for want of an interval or of a direction",
}


@dataclass(frozen=True)
class CardInputs:
    """The inputs of a card. model_id, dataset_id: hub ids or None; revision: the base's commit;
    adapter_config: PEFT's; nf4_base_id: of the 4-bit base."""

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
    overrides: dict[str, Any] | None = None
    """Part of the config.json: rotary positions of the training, unlike the base's own."""


def model_card(inputs: CardInputs) -> str:
    """Return the card as Markdown with the hub's metadata."""
    facts, served = inputs.quantization, inputs.measured.served.subject
    is_other = facts.taken or facts.only_here is not None or inputs.nf4_base_id is not None
    in_4_bits = served == "tuned" and facts.method != "none"
    loads_folder = in_4_bits and is_other and not facts.taken  # its config.json has the positions
    overrides = inputs.overrides or {}
    arguments = inputs.manifest.template_kwargs or {}
    variables = {
        **vars(inputs),
        "metadata": _metadata(inputs).to_yaml(),
        # A path of this machine is not published.
        "base_name": inputs.model_id or inputs.summary.settings.model.name,
        "served_name": served,
        "positions": None if loads_folder else overrides.get(TEXT_PART, overrides),
        "in_4_bits": in_4_bits,
        # Transformers makes the 4-bit base of the original when it loads it.
        "is_made_anew": in_4_bits and not is_other,
        "not_evaluated": [FORMS[n].label for n in TRAINED if n not in inputs.measured.subjects],
        "dtype": inputs.parity.compute_dtype,
        "arguments": ", ".join(f"{name} = {value!r}" for name, value in arguments.items()),
        "objective": objective_words(inputs.summary.settings),
    }
    return _environment().get_template("card.md.j2").render(variables)


def needs_folder(card: str) -> bool:
    """Tell whether a card loads the base from a folder of the run's machine."""
    return NF4_FOLDER in card


def _metadata(inputs: CardInputs) -> ModelCardData:
    return ModelCardData(
        base_model=inputs.model_id,
        base_model_relation="adapter" if inputs.model_id else None,
        datasets=inputs.dataset_id,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "qlora", "fsdp"],
        model_name=inputs.summary.run,
        eval_results=_eval_results(inputs) or None,
    )


def _eval_results(inputs: CardInputs) -> list[EvalResult]:
    heldout = inputs.measured.served.heldout
    source = inputs.dataset_id or inputs.dataset
    measured = {"loss": heldout.loss, "perplexity": heldout.perplexity} if heldout else {}
    heldout_results = [
        EvalResult("text-generation", source, f"{inputs.dataset}, held out", metric, value)
        for metric, value in measured.items()
    ]
    return heldout_results + [
        EvalResult("text-generation", visible(task), visible(task), visible(metric), score.value)
        for task, result in inputs.measured.served.tasks.items()
        for metric, score in result.metrics.items()
    ]


def text(value: object) -> Markup:
    """Write foreign text on one line of Markdown: no markup, no cell border, no link."""
    if isinstance(value, Markup):
        return value
    flat = " ".join(visible(str(value)).split())
    return Markup(re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", html.escape(flat, quote=False)))


def _environment() -> Environment:
    environment = templates(text, keep_trailing_newline=True)
    filters: dict[str, Callable[[Any], str]] = {
        **NUMBERS,
        "probability": lambda value: html.escape(probability(value)),
        "code": lambda value: f"<code>{text(value)}</code>",
        "quoted": lambda value: repr(visible(value)),
        "shown": visible,
    }
    environment.filters |= {name: _markup(write) for name, write in filters.items()}
    environment.filters |= {"label": label, "public_name": public_name}
    environment.globals |= {
        "forms": FORMS,
        "outcomes": OUTCOMES,
        "changes": CHANGES,
        "nf4_folder": NF4_FOLDER,
    }
    return environment


def _markup(write: Callable[[Any], str]) -> Callable[[Any], Markup]:
    return lambda value: Markup(write(value))

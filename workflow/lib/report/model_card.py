"""The model card (`README.md`) of an exported adapter, in the format of the Hugging Face hub.

Everything in it is read from the artifacts: what was trained on what and how, what it scored beside
its base, and what neither tells. All of the text that comes from elsewhere is written so that
Markdown shows it as it is.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from huggingface_hub import EvalResult, ModelCardData

from workflow.lib.artifacts.evaluation_record import SUBJECT_LABELS, Evaluation, TunedEvaluation
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.records import Interval
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.report.run_results import paired_scores
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.number_formats import (
    count,
    duration,
    general,
    hours,
    loss,
    probability,
    share,
    signed,
    visible,
)

# By what a metric's paired interval says (`TaskScore.change`).
CHANGE_SENTENCES = {
    "better": "Better than the NF4 base, by the 95% interval: {}.",
    "worse": "Worse than the NF4 base, by the 95% interval: {}.",
    "without a clear change": "No clear change against the NF4 base: {}.",
    "not judged": "Not judged, for want of an interval or of a direction: {}.",
}
BLOCK_OF_BITSANDBYTES = (
    64  # weights per scale; `BitsAndBytesConfig` of Transformers 5.23 names no other
)


@dataclass(frozen=True)
class CardInputs:
    """What a card is written from.

    `model_id`, `dataset_id`: hub ids, None for local folders and files. `revision`: commit of the
    base on the hub.
    """

    model_id: str | None
    revision: str | None
    dataset_id: str | None
    dataset: str
    quantize: QuantizeConfig
    summary: Summary
    manifest: Manifest
    parity: Parity
    base: Evaluation
    tuned: TunedEvaluation

    @property
    def base_name(self) -> str:
        """The base by its hub id, or its label: a path of the machine is nothing to publish."""
        return self.model_id or self.summary.settings.model.name


def model_card(inputs: CardInputs) -> str:
    """Return the card: metadata, how to load it, data, training, results, limits."""
    sections = {
        "Use": _use(inputs),
        "Data": _table(_data(inputs)),
        "Training": _table(_training(inputs)),
        "Results": _results(inputs),
        "Limits": "\n".join(f"- {limit}" for limit in _limits(inputs)) + "\n",
    }
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    summary = inputs.summary
    return (
        f"---\n{_metadata(inputs).to_yaml()}\n---\n\n# {text(summary.run)}\n\n"
        f"A LoRA adapter for {code(inputs.base_name)}, trained with FSDP-QLoRA. "
        f"{_verdict(inputs)}\n\n{body}"
    )


def text(value: object) -> str:
    """Write text from elsewhere on one line of Markdown: no markup, no cell border, no link."""
    flat = " ".join(visible(str(value)).split())
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", html.escape(flat, quote=False))


def code(value: object) -> str:
    """Write text from elsewhere as code in a line or a table's cell."""
    return f"<code>{text(value)}</code>"


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
    """Return held-out loss and perplexity and every task's score, in the hub's terms."""
    heldout = inputs.tuned.heldout
    source = inputs.dataset_id or inputs.dataset
    measured = {"loss": heldout.loss, "perplexity": heldout.perplexity} if heldout else {}
    own = [
        EvalResult("text-generation", source, f"{inputs.dataset}, held out", metric, value)
        for metric, value in measured.items()
    ]
    return own + [
        EvalResult("text-generation", visible(task), visible(task), visible(metric), score.value)
        for task, result in inputs.tuned.tasks.items()
        for metric, score in result.metrics.items()
    ]


def _verdict(inputs: CardInputs) -> str:
    difference = inputs.tuned.comparison
    if difference.loss_difference is None or difference.loss_difference_ci95 is None:
        return "Its held-out loss was not measured."
    low, high = difference.loss_difference_ci95
    words = "lower than" if low > 0 else "higher than" if high < 0 else "not clearly different from"
    return (
        f"Its held-out loss is {words} that of the base in 4 bits (NF4): NF4 base - tuned "
        f"{signed(difference.loss_difference)} {_interval(difference.loss_difference_ci95)} nats "
        "per token."
    )


def _use(inputs: CardInputs) -> str:
    """Return how to load what was evaluated, and what was not evaluated."""
    dtype = inputs.parity.compute_dtype
    remarks = [
        f"The results below are those of this: the adapter on the NF4 base, computed in {dtype}.",
        "The adapter on weights that are not quantized is another model, which was not evaluated.",
        *_about_the_base(inputs, dtype=dtype),
    ]
    return f"```python\n{_loading(inputs, dtype=dtype)}```\n\n{' '.join(remarks)}\n"


def _about_the_base(inputs: CardInputs, *, dtype: str) -> list[str]:
    """Return what a reader must know to put the right base under the adapter."""
    base, block = code(inputs.base_name), inputs.quantize.block_size
    remarks = []
    if block != BLOCK_OF_BITSANDBYTES:
        remarks.append(
            f"`path/to/nf4/base` is the folder that the workflow has made of {base}: its blocks "
            f"hold {block} weights, "
            f"and Transformers itself quantizes in blocks of {BLOCK_OF_BITSANDBYTES}."
        )
    elif inputs.model_id is None:
        remarks.append(f"`path/to/base` is the folder of {base}.")
    if block == BLOCK_OF_BITSANDBYTES and dtype != "float32":
        remarks.append(f"The 4-bit weights are the same if the base is stored in {dtype}.")
    if inputs.model_id is None:
        remarks.append(
            "`adapter_config.json` names the base by its path on the machine that exported the "
            "adapter: "
            "put a hub id there before you publish it."
        )
    return remarks


def _loading(inputs: CardInputs, *, dtype: str) -> str:
    """Return the code that loads model, tokenizer and generation settings."""
    is_made_anew = inputs.quantize.block_size == BLOCK_OF_BITSANDBYTES
    source = inputs.model_id or "path/to/base"
    options = [f"{visible(source if is_made_anew else 'path/to/nf4/base')!r},"]
    if is_made_anew and inputs.revision:
        options.append(f"revision={visible(inputs.revision)!r},")
    options.append(f"dtype=torch.{dtype},")
    if is_made_anew:
        options += [
            "quantization_config=BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            f"    bnb_4bit_use_double_quant={inputs.quantize.double_quant},",
            f"    bnb_4bit_compute_dtype=torch.{dtype},",
            "),",
        ]
    lines = [
        "import torch",
        "from peft import PeftModel",
        "from transformers import (",
        "    AutoModelForCausalLM,",
        "    AutoTokenizer,",
        *(["    BitsAndBytesConfig,"] if is_made_anew else []),
        "    GenerationConfig,",
        ")",
        "",
        'adapter = "path/to/this/folder"',
        "base = AutoModelForCausalLM.from_pretrained(",
        *(f"    {option}" for option in options),
        ")",
        "model = PeftModel.from_pretrained(base, adapter)",
        "tokenizer = AutoTokenizer.from_pretrained(adapter)",
        "model.generation_config = GenerationConfig.from_pretrained(adapter)",
    ]
    return "".join(f"{line}\n" for line in lines)


def _data(inputs: CardInputs) -> list[tuple[str, str]]:
    train, heldout = inputs.manifest.splits.train, inputs.manifest.splits.heldout
    files = ", ".join(f"{_file(s.file)} ({count(s.rows)} rows)" for s in inputs.manifest.sources)
    template = (
        "none"
        if inputs.manifest.chat_template_sha256 is None
        else "<code>chat_template.jinja</code>, in this folder"
    )
    return [
        ("Files", files),
        ("Format", code(inputs.manifest.format)),
        ("Chat template", template),
        (
            "Rows",
            f"{count(train.rows_kept)} trained, {count(heldout.rows_kept)} held out, "
            f"{count(train.rows_dropped + heldout.rows_dropped)} dropped",
        ),
        (
            "Tokens",
            f"{count(train.tokens)}, {share(train.trained_tokens / max(1, train.tokens))} of them "
            f"trained; rows of {count(inputs.manifest.seq_len)}, {share(train.fill)} full",
        ),
        (
            "Lengths",
            f"median {count(train.length_percentiles.p50)}, 99th percentile "
            f"{count(train.length_percentiles.p99)}, longest {count(train.length_percentiles.max)} "
            f"tokens; {count(train.truncated)} cut",
        ),
        ("Duplicates", f"{count(train.duplicates)} rows equal an earlier one"),
    ]


def _file(path: str) -> str:
    """Return a data file as the settings name it; an absolute path, which is the machine's, by its
    name.
    """
    return code(PurePath(path).name if PurePath(path).is_absolute() else path)


def _training(inputs: CardInputs) -> list[tuple[str, str]]:
    summary, parity = inputs.summary, inputs.parity
    lora, train = summary.settings.lora.model_dump(), summary.settings.train
    targets = lora["target_modules"]
    named = "all linear layers" if targets == "all-linear" else ", ".join(map(code, targets))
    return [
        ("Base model", f"{code(inputs.base_name)}, NF4 with bitsandbytes"),
        (
            "Adapter",
            f"LoRA, rank {lora['r']}, alpha {lora['alpha']:g}, targets "
            f"{named}{_whole(summary.settings.lora.modules_to_save)}",
        ),
        (
            "Trainable parameters",
            f"{count(summary.trainable_parameters)} of {count(summary.total_parameters)}",
        ),
        (
            "Optimizer steps",
            f"{count(summary.num_steps)} of {summary.global_batch_size} rows of {summary.seq_len} "
            "tokens",
        ),
        (
            "Peak learning rate",
            f"{train['learning_rate']:g}, {train['lr_schedule']} schedule, seed {train['seed']}",
        ),
        (
            "Training loss",
            f"{loss(summary.first_loss)} at the start, {loss(summary.final_loss)} at the end (nats "
            "per trained token)",
        ),
        (
            "Hardware",
            f"{summary.processes} x {text(summary.device_name)}, {duration(summary.elapsed_s)}, "
            f"{hours(summary.device_hours)} {'GPU' if summary.device == 'cuda' else 'process'} "
            "hours",
        ),
        (
            "Export check",
            "logits of the reloaded adapter differ from the trained model's by "
            f"{parity.rms_difference:.2g} (root mean square, tolerance {parity.tolerance:.2g}) at "
            f"{parity.positions} positions",
        ),
        ("Commit of the workflow", code(summary.provenance.commit or "no checkout")),
        (
            "Versions",
            ", ".join(
                f"{text(name)} {text(version)}"
                for name, version in sorted(summary.provenance.packages.items())
            ),
        ),
    ]


def _whole(modules: Sequence[str]) -> str:
    """Return what is trained whole beside the adapter, as the end of its line."""
    return f"; {' and '.join(map(code, modules))} trained whole" if modules else ""


def _table(facts: list[tuple[str, str]]) -> str:
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts)
    return f"| | |\n|---|---|\n{rows}"


def _results(inputs: CardInputs) -> str:
    """Return the table of scores and what they say; a sentence if nothing was measured."""
    rows = [*_heldout_rows(inputs), *_task_rows(inputs)]
    if not rows:
        return "Nothing was measured.\n"
    base, tuned = SUBJECT_LABELS["base"], SUBJECT_LABELS["tuned"]
    head = f"| measured | {base} | {tuned} | difference |\n|---|---|---|---|\n"
    return (
        head + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"
        f"{base}: the base model in 4 bits, without the adapter. {tuned.capitalize()}: with it. "
        "The base model before its quantization was not measured.\n"
        f"Brackets are 95% intervals; differences are paired, held-out loss {base} - {tuned}, "
        f"tasks {tuned} - {base}.\n"
        + "".join(f"\n- {sentence}" for sentence in _changes(inputs))
        + "\n"
    )


def _changes(inputs: CardInputs) -> list[str]:
    """Return which metrics of the tasks became better and which did not, a sentence each."""
    scores = paired_scores(inputs.base, inputs.tuned)
    metrics = {
        change: [f"{text(s.task)} {text(s.metric)}" for s in scores if s.change == change]
        for change in CHANGE_SENTENCES
    }
    return [
        CHANGE_SENTENCES[change].format(", ".join(some)) for change, some in metrics.items() if some
    ]


def _heldout_rows(inputs: CardInputs) -> list[tuple[str, str, str, str]]:
    base, tuned, paired = inputs.base.heldout, inputs.tuned.heldout, inputs.tuned.comparison
    if base is None or tuned is None or paired.loss_difference is None:
        return []
    p = "" if paired.p_value is None else f", {probability(paired.p_value)}".replace("<", "&lt;")
    return [
        (
            f"loss on {count(tuned.documents)} held-out documents, nats per token",
            f"{loss(base.loss)} {_interval(base.loss_ci95)}",
            f"{loss(tuned.loss)} {_interval(tuned.loss_ci95)}",
            f"{signed(paired.loss_difference)} {_interval(paired.loss_difference_ci95)}{p}",
        ),
        ("perplexity", general(base.perplexity), general(tuned.perplexity), ""),
    ]


def _task_rows(inputs: CardInputs) -> list[tuple[str, str, str, str]]:
    rows = []
    for task, result in inputs.tuned.tasks.items():
        for metric, score in result.metrics.items():
            paired = inputs.tuned.comparison.tasks[task][metric]
            before = inputs.base.tasks[task].metrics[metric].value
            difference = f"{signed(paired.difference)} {_interval(paired.difference_ci95)}".strip()
            name = f"{text(task)}, {text(metric)}, {count(result.items)} items"
            rows.append((name, loss(before), loss(score.value), difference))
    return rows


def _interval(ends: Interval | None) -> str:
    return "" if ends is None else f"\\[{loss(ends[0])}, {loss(ends[1])}\\]"


def _limits(inputs: CardInputs) -> list[str]:
    """Return what the numbers above do not tell, by the numbers where they say so."""
    train = inputs.manifest.splits.train
    return [
        "The held-out documents come from the same source as the training data: the loss says "
        "nothing about other texts.",
        f"Rows were at most {count(inputs.manifest.seq_len)} tokens long, and "
        f"{count(train.truncated)} were cut there: longer inputs were not trained.",
        "The adapter was trained and evaluated on the NF4 weights; on unquantized weights its "
        "outputs differ.",
        "Safety, bias, and languages or skills beyond the tasks above were not measured. The base "
        "model's licence and limits apply.",
    ]

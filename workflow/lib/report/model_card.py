"""The model card (`README.md`) of an exported adapter, in the format of the Hugging Face hub.

Everything in it is read from the artifacts: what was trained on what and how, what it scored beside
its base, and what neither tells. All of the text that comes from elsewhere is written so that
Markdown shows it as it is."""

from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCardData

from workflow.lib.artifacts.training_record import Summary, TrainedSettings
from workflow.lib.report.card_inputs import CardInputs, code, text
from workflow.lib.report.card_results import gguf_section, results_section, verdict_sentence
from workflow.lib.report.card_use import served_sentence, serving_section, use_section
from workflow.lib.settings.objectives import needs_of
from workflow.lib.system.number_formats import count, duration, hours, loss, share, visible
from workflow.lib.system.redaction import public_name


def model_card(inputs: CardInputs) -> str:
    sections = {
        "Use": use_section(inputs),
        "Serving": serving_section(inputs),
        **({"GGUF": gguf_section(inputs.gguf)} if inputs.gguf else {}),
        "Data": _table(_data(inputs)),
        "Training": _table(_training(inputs)),
        "Results": results_section(inputs),
        "Limits": "\n".join(f"- {limit}" for limit in _limits(inputs)) + "\n",
    }
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    summary = inputs.summary
    served = "" if inputs.checked is None else f"{served_sentence(inputs.checked)} "
    return (
        f"---\n{_metadata(inputs).to_yaml()}\n---\n\n# {text(summary.run)}\n\nA LoRA adapter for "
        f"{code(inputs.base_name)}, trained with FSDP-QLoRA. {served}"
        f"{verdict_sentence(inputs)}\n\n{body}"
    )


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
    own = [
        EvalResult("text-generation", source, f"{inputs.dataset}, held out", metric, value)
        for metric, value in measured.items()
    ]
    return own + [
        EvalResult("text-generation", visible(task), visible(task), visible(metric), score.value)
        for task, result in inputs.measured.served.tasks.items()
        for metric, score in result.metrics.items()
    ]


def _data(inputs: CardInputs) -> list[tuple[str, str]]:
    train, heldout = inputs.manifest.splits.train, inputs.manifest.splits.heldout
    files = ", ".join(
        f"{code(public_name(s.file))} ({count(s.rows)} rows)" for s in inputs.manifest.sources
    )
    template = (
        "none"
        if inputs.manifest.chat_template_sha256 is None
        else "<code>chat_template.jinja</code>, in this folder"
    )
    arguments = inputs.manifest.template_kwargs or {}
    if arguments:
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        template += f", with {code(given)} unless told otherwise"
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


def _training(inputs: CardInputs) -> list[tuple[str, str]]:
    summary, parity = inputs.summary, inputs.parity
    lora, train = summary.settings.lora.model_dump(), summary.settings.train
    drawn, targets = summary.energy_j, lora["target_modules"]
    energy = "energy not measured" if drawn is None else f"{drawn / 3.6e6:.3g} kWh"
    named = "all linear layers" if targets == "all-linear" else ", ".join(map(code, targets))
    return [
        ("Base model", f"{code(inputs.base_name)}, NF4 with bitsandbytes"),
        *_lineage(summary),
        *_objective(summary.settings),
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
            f"tokens{', then early stopping' if summary.planned_steps else ''}",
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
            f"hours, {energy}",
        ),
        (
            "Export check",
            "logits of the reloaded adapter differ from the trained model's by "
            f"{parity.rms_difference:.2g} (root mean square, tolerance {parity.tolerance:.2g}) at "
            f"{parity.positions} positions",
        ),
        (
            "Certificate",
            "`certificate.json`, where this is published; `snakemake verify` checks its hashes "
            "and numbers",
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


def _lineage(summary: Summary) -> list[tuple[str, str]]:
    before = " → ".join(code(ancestor.told) for ancestor in summary.lineage)
    return [("Continues", f"{before} → this adapter, on the same base")] if before else []


def _objective(settings: TrainedSettings) -> list[tuple[str, str]]:
    name = settings.train.get("objective", "sft")
    if name == "sft":
        return []
    given = []
    for setting in needs_of(name).settings:
        section, _, key = setting.partition(".")
        value = getattr(settings, section).get(key)
        given += [] if value is None else [f"{text(key)} {text(value)}"]
    return [("Objective", ", ".join([text(name), *given]))]


def _whole(modules: Sequence[str]) -> str:
    return f"; {' and '.join(map(code, modules))} trained whole" if modules else ""


def _table(facts: list[tuple[str, str]]) -> str:
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts)
    return f"| | |\n|---|---|\n{rows}"


def _limits(inputs: CardInputs) -> list[str]:
    train = inputs.manifest.splits.train
    return [
        "The held-out documents come from the same source as the training data: the loss says "
        "nothing about other texts.",
        f"Rows were at most {count(inputs.manifest.seq_len)} tokens long, and "
        f"{count(train.truncated)} were cut there: longer inputs were not trained.",
        "The adapter was trained on the NF4 weights; on unquantized weights its outputs differ.",
        "Safety, bias, and languages or skills beyond the tasks above were not measured. The base "
        "model's licence and limits apply.",
    ]

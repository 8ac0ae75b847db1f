# Fine-tune large language models by FSDP + QLoRA: tokens, NF4 base, preflight, training, export,
# evaluation, report. Settings: config.yaml. Shape of the workflow: workflow/docs/architecture.md.
from snakemake.utils import min_version

min_version("9.0")


# Reads the settings.
include: "workflow/rules/common.smk"
include: "workflow/rules/inputs.smk"


container: container_image()


include: "workflow/rules/download_source.smk"
include: "workflow/rules/extend_model.smk"
include: "workflow/rules/describe_model.smk"
include: "workflow/rules/tokenize_dataset.smk"
include: "workflow/rules/preview.smk"
include: "workflow/rules/quantize_base.smk"
include: "workflow/rules/score_tokens.smk"
include: "workflow/rules/preflight_run.smk"
include: "workflow/rules/finetune.smk"
include: "workflow/rules/consolidate.smk"
include: "workflow/rules/export_step.smk"
include: "workflow/rules/download_converter.smk"
include: "workflow/rules/check_gguf.smk"
include: "workflow/rules/convert_gguf.smk"
include: "workflow/rules/evaluate_run.smk"
include: "workflow/rules/check_served.smk"
include: "workflow/rules/write_card.smk"
include: "workflow/rules/render_report.smk"
include: "workflow/rules/require_gain.smk"
include: "workflow/rules/publish_run.smk"


localrules:
    all,
    tokenize,
    preview,
    preflight,
    train,
    evaluate,
    report,
    publish,


# Every target names the artifacts of all stages before it. Snakemake removes the outputs of a failed job,
# and does not remake a missing intermediate one as long as its later artifacts exist.
rule tokenize:
    input:
        [layout.description(run) for run in RUNS.values()],
        [manifest(run) for run in RUNS.values()],


rule preflight:
    input:
        rules.tokenize.input,
        predictions=of_runs("preflight_run", "preflight.json", names=RUNS),
    log:
        "logs/preflight/preflight.log",
    conda:
        "envs/torch.yaml"
    params:
        runs=list(RUNS),
    shell:
        "python -m workflow.scripts.show_preflight --runs {params.runs:q} --predictions {input.predictions:q} --log {log:q}"


rule train:
    input:
        rules.preflight.input,
        [layout.base_dir(run) for run in RUNS.values()],
        of_runs(
            "finetune",
            "adapter",
            "adapter_config.json",
            "metrics.jsonl",
            "parity.safetensors",
            "summary.json",
            names=RUNS,
        ),
        of_runs(
            "consolidate",
            *[f"adapter/{file}" for file in ADAPTER_FILES],
            "parity.json",
            names=RUNS,
        ),
        [folder for name in RUNS for folder in step_adapters(name)],
        [exported(name, form) for form, names in EXPORTING.items() for name in names],


rule evaluate:
    input:
        rules.train.input,
        evaluations(),
        [served_check(name) for name in SERVED],
        of_runs("consolidate", "adapter/README.md", names=RUNS),
        requirements(),


rule report:
    input:
        rules.evaluate.input,
        rules.render_report.output,


# Uploads to the repositories of `export.hub_repo`; no part of `all`.
rule publish:
    input:
        publications(),


rule all:
    default_target: True
    input:
        rules.report.input,

BY_DOWNLOAD = {
    f"{kind}/{Path(folder).name}": layout.download_settings(kind, run)
    for run in RUNS.values()
    for kind, folder in layout.download_dirs(run).items()
} | {
    f"scored/{Path(model.model).name}": model.download
    for model in SCORED.values()
    if model.download
}


rule download_source:
    output:
        directory("results/hub/{kind}/{download}"),
    log:
        "logs/download_source/{kind}/{download}.log",
    # One at a time, datasets and adapters first: their wrong file names show before the large model is downloaded.
    priority: lambda w: FIRST + (w.kind != "model")
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: workflow.cores if on_this_machine() else 1
    params:
        config=lambda w: json.dumps(BY_DOWNLOAD[f"{w.kind}/{w.download}"], sort_keys=True),
        # Not recorded, since derived from `output`: it does not change the files.
        checks=lambda w, output: checks(
            layout.start_adapter if w.kind == "adapter" else layout.source_dir,
            f"results/hub/{w.kind}/{w.download}",
        ),
    shell:
        "python -m workflow.scripts.download_source --config {params.config:q}"
        " --checks {params.checks:q} --output {output:q} --log {log:q}"

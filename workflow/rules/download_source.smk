DOWNLOADS = {
    folder: layout.download_settings(kind, run)
    for run in RUNS.values()
    for kind, folder in layout.download_dirs(run).items()
} | {model.model: model.download for model in SCORED.values() if model.download}


rule download_source:
    input:
        settings=settings(
            "download_source", lambda w: DOWNLOADS[f"results/hub/{w.kind}/{w.download}"]
        ),
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
        checks=model_checks,
    shell:
        "python -m workflow.scripts.download_source --config {input.settings:q}"
        " --checks {params.checks:q} --output {output:q} --log {log:q}"

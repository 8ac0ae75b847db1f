rule download_source:
    output:
        directory("results/hub/{kind}/{download}"),
    log:
        "logs/download_source/{kind}/{download}.log",
    # Datasets first: a file name that is wrong there shows before the large model has come.
    priority: lambda w: FIRST + (w.kind == "dataset")
    conda:
        "../../envs/torch.yaml"
    resources:
        accelerator=1,
    params:
        config=lambda w: json.dumps(
            BY_DOWNLOAD[f"{w.kind}/{w.download}"], sort_keys=True
        ),
    shell:
        "python -m workflow.scripts.download_source --config {params.config:q}"
        " --output {output:q} --log {log:q}"

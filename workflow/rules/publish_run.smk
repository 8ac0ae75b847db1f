# No part of `all`: `snakemake --cores 1 publish` requests it.
rule publish_run:
    input:
        settings=settings("publish_run"),
        files=published_files,
        card="results/runs/{run}/consolidate/adapter/README.md",
        summary="results/runs/{run}/finetune/summary.json",
        parity="results/runs/{run}/consolidate/parity.json",
        requirements=requirements,
    output:
        "results/runs/{run}/publish_run/published.json",
    log:
        "logs/publish_run/{run}.log",
    conda:
        "../../envs/torch.yaml"
    shell:
        "python -m workflow.scripts.publish_run --config {input.settings:q} --run {wildcards.run:q}"
        " --folder {input.files[0]:q} --card {input.card:q} --summary {input.summary:q}"
        " --parity {input.parity:q} --output {output:q} --log {log:q}"

# No part of `all`: `snakemake --cores 1 publish` requests it.
rule publish_run:
    input:
        weights=lambda w: published_files(w.run),
        card="results/runs/{run}/consolidate/adapter/README.md",
        summary="results/runs/{run}/finetune/summary.json",
        parity="results/runs/{run}/consolidate/parity.json",
        requirements=lambda w: requirements(),
    output:
        "results/runs/{run}/publish_run/published.json",
    log:
        "logs/publish_run/{run}.log",
    conda:
        "../../envs/torch.yaml"
    params:
        config=lambda w: layout.stage_json("publish_run", RUNS[w.run]),
        folder=lambda w, input: published_folder(w.run, input.weights),
    shell:
        "python -m workflow.scripts.publish_run --config {params.config:q} --run {wildcards.run:q}"
        " --folder {params.folder:q} --card {input.card:q} --summary {input.summary:q}"
        " --parity {input.parity:q} --output {output:q} --log {log:q}"

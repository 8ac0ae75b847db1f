# No part of `all`: `snakemake --cores 1 certify` and `publish` request it.
rule certify_run:
    input:
        base=lambda w: layout.base_dir(RUNS[w.run]),
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        weights="results/runs/{run}/consolidate/adapter/adapter_model.safetensors",
        others=lambda w: certified_folders(w.run),
        evaluation="results/runs/{run}/evaluate_run",
        summary="results/runs/{run}/finetune/summary.json",
        parity="results/runs/{run}/consolidate/parity.json",
        served=lambda w: served_check(w.run),
        tokens=lambda w: [manifest(RUNS[w.run]), *layout.token_arrays(RUNS[w.run])],
        downloads=lambda w: list(layout.download_dirs(RUNS[w.run]).values()),
        key=lambda w: users(RUNS[w.run].export.signing_key),
        published=lambda w: published_files(w.run),
    output:
        "results/runs/{run}/certify_run/certificate.json",
    log:
        "logs/certify_run/{run}.log",
    conda:
        "../../envs/torch.yaml"
    params:
        config=lambda w: layout.stage_json("certify_run", RUNS[w.run]),
        require=lambda w: json.dumps(RUNS[w.run].evaluate.require, sort_keys=True),
        model=lambda w: located(layout.model_dir(RUNS[w.run])),
        data=lambda w: [located(file) for file in layout.data_files(RUNS[w.run])],
        adapter=subpath(input.weights, parent=True),
        published=lambda w, input: published_folder(w.run, input.published),
        records=lambda w, input: [f"{folder}/source.json" for folder in input.downloads],
    shell:
        "python -m workflow.scripts.certify_run --config {params.config:q} --run {wildcards.run:q}"
        " --folders {input.base:q} {params.adapter:q} {input.others:q}"
        " --files {input.summary:q} {input.parity:q} {input.served:q} {input.tokens:q} {params.records:q}"
        " --model {params.model:q} --data {params.data:q} --require {params.require:q}"
        " --evaluation {input.evaluation:q} --published {params.published:q} --output {output:q} --log {log:q}"

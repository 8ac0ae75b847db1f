# A stage of its own, so that the card in the adapter's folder has the evaluation's results.
rule write_card:
    input:
        summary=rules.finetune.output.summary,
        adapter_config="results/runs/{run}/consolidate/adapter/adapter_config.json",
        base=lambda w: layout.base_dir(RUNS[w.run]),
        manifest=lambda w: manifest(RUNS[w.run]),
        parity="results/runs/{run}/consolidate/parity.json",
        evaluation="results/runs/{run}/evaluate_run",
        gguf=lambda w: exported(w.run, "gguf"),
        served=lambda w: served_check(w.run),
    output:
        "results/runs/{run}/consolidate/adapter/README.md",
    log:
        "logs/write_card/{run}.log",
    conda:
        "../../envs/torch.yaml"
    params:
        # Snakemake compares this. It does not record params derived from `output`.
        recorded=lambda w: layout.recorded_json("write_card", RUNS[w.run]),
        config=lambda w, output: layout.stage_json("write_card", RUNS[w.run]),
        checks=lambda w, input: [
            *(["--gguf", input.gguf] if input.gguf else []),
            *(["--served", input.served] if input.served else []),
        ],
    shell:
        "python -m workflow.scripts.write_card --config {params.config:q} --summary {input.summary:q}"
        " --adapter-config {input.adapter_config:q} --base {input.base:q}"
        " --manifest {input.manifest:q}"
        " --parity {input.parity:q} --evaluation {input.evaluation:q} {params.checks:q}"
        " --output {output:q} --log {log:q}"

rule preflight_run:
    input:
        description=lambda w: layout.description(RUNS[w.run]),
        manifest=lambda w: manifest(RUNS[w.run]),
    output:
        "results/runs/{run}/preflight_run/preflight.json",
    log:
        "logs/preflight_run/{run}.log",
    priority: FIRST
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[w.run])
    params:
        # Snakemake compares this. It does not record params derived from `output`.
        recorded=lambda w: layout.recorded_json("preflight_run", RUNS[w.run]),
        config=lambda w, output: layout.stage_json("preflight_run", RUNS[w.run]),
    shell:
        "python -m workflow.scripts.preflight_run --config {params.config:q} --run {wildcards.run:q}"
        " --model {input.description:q} --tokens {input.manifest:q} --output {output:q} --log {log:q}"

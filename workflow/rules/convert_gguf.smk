# A file a format; which ones, the settings say.
rule convert_gguf:
    input:
        merged="results/runs/{run}/consolidate/merged",
        tokens=lambda w: f"{layout.tokens_dir(RUNS[w.run])}/manifest.json",
        arrays=lambda w: layout.token_arrays(RUNS[w.run]),
    output:
        directory("results/runs/{run}/convert_gguf"),
    log:
        "logs/convert_gguf/{run}.log",
    wildcard_constraints:
        run=any_of(IN_GGUF),
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[w.run], most=1)
    params:
        config=lambda w: layout.stage_json("convert_gguf", RUNS[w.run]),
        tokens=subpath(input.tokens, parent=True),
    shell:
        "python -m workflow.scripts.convert_gguf --config {params.config:q} --run {wildcards.run:q}"
        " --merged {input.merged:q} --tokens {params.tokens:q} --output {output:q} --log {log:q}"

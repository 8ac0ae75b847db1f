# Only for runs whose objective reads a reference's or a teacher's scores. Runs of a sweep share them.
rule score_tokens:
    input:
        tokens=lambda w: manifest(RUNS[BY_SCORES[w.scores]]),
        arrays=lambda w: layout.token_arrays(RUNS[BY_SCORES[w.scores]]),
        base=lambda w: SCORED[BY_SCORES[w.scores]].base or [],
        model=lambda w: scored_files(BY_SCORES[w.scores]),
        tokenizer=lambda w: model_files(RUNS[BY_SCORES[w.scores]], TOKENIZER_PATTERNS),
    output:
        directory("results/scores/{scores}"),
    log:
        "logs/score_tokens/{scores}.log",
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[BY_SCORES[w.scores]])
    resources:
        gpu=lambda w: cards(RUNS[BY_SCORES[w.scores]]),
        mem_mb=requested("mem_mb", READING, lambda w: RUNS[BY_SCORES[w.scores]]),
        runtime=requested("runtime", READING, lambda w: RUNS[BY_SCORES[w.scores]]),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.recorded_json("score_tokens", RUNS[BY_SCORES[w.scores]]),
        tokens=subpath(input.tokens, parent=True),
        scored=lambda w: [located(part) for part in SCORED[BY_SCORES[w.scores]].options],
        tokenizer=lambda w: located(layout.model_dir(RUNS[BY_SCORES[w.scores]])),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.score_tokens --config {params.config:q} {params.scored:q}"
        " --tokens {params.tokens:q} --tokenizer {params.tokenizer:q}"
        " --output {output:q} --log {log:q}"

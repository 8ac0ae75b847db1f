# Only for runs whose objective reads a reference's or a teacher's scores. Runs of a sweep share them.
rule score_tokens:
    input:
        settings=settings(
            "score_tokens",
            lambda w: layout.stage_settings("score_tokens", run_of(w))
            | {"scored": SCORES[w.scores].facts},
        ),
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
        base=lambda w: SCORES[w.scores].base or [],
        model=lambda w: inputs_in(SCORES[w.scores].model, SCORES[w.scores].files),
        tokenizer=from_run(tokenizer_files),
    output:
        directory("results/scores/{scores}"),
    log:
        "logs/score_tokens/{scores}.log",
    benchmark:
        "results/benchmarks/score_tokens/{scores}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.score_tokens --config {input.settings:q} --base {input.base:q}"
        " --model {input.model:q} --tokens {input.tokens:q} --tokenizer {input.tokenizer[0]:q}"
        " --output {output:q} --log {log:q}"

# Before all long stages, and no input of the training, which it must not rerun. Runs with equal settings share it.
rule check_servable:
    input:
        model=lambda w: model_files(BY_SERVABLE[w.servable], TOKENIZER_PATTERNS),
        description=lambda w: layout.description(BY_SERVABLE[w.servable]),
        converter=lambda w: (
            layout.CONVERTERS
            if BY_SERVABLE[w.servable].export.serve == "llama_cpp"
            and not BY_SERVABLE[w.servable].export.llama_cpp
            else []
        ),
    output:
        "results/servable/{servable}/servable.json",
    log:
        "logs/check_servable/{servable}.log",
    priority: FIRST + 2
    conda:
        "../../envs/gguf.yaml"
    threads: lambda w: cores(BY_SERVABLE[w.servable], most=1)
    resources:
        gpu=lambda w: cards(BY_SERVABLE[w.servable], most=1),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.stage_json("check_servable", BY_SERVABLE[w.servable]),
        model=lambda w: located(layout.model_dir(BY_SERVABLE[w.servable])),
        trial=lambda w, input: trial_options(BY_SERVABLE[w.servable], input),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.check_servable --config {params.config:q} {params.trial:q}"
        " --model {params.model:q} --output {output:q} --log {log:q}"

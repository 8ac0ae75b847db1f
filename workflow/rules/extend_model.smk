rule extend_model:
    input:
        model=lambda w: source_files(BY_MODEL[w.model]),
    output:
        directory("results/extended/{model}"),
    log:
        "logs/extend_model/{model}.log",
    # Before all stages that read it: it refuses tokens that exist already.
    priority: FIRST + 2
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    params:
        config=lambda w: layout.recorded_json("extend_model", BY_MODEL[w.model]),
        model=lambda w: located(layout.source_dir(BY_MODEL[w.model])),
    shell:
        "python -m workflow.scripts.extend_model --config {params.config:q} --model {params.model:q}"
        " --output {output:q} --log {log:q}"

rule extend_model:
    input:
        settings=settings("extend_model"),
        model=from_run(lambda run: local_inputs(layout.source_dir(run))),
    output:
        directory("results/extended/{model}"),
    log:
        "logs/extend_model/{model}.log",
    # Before all stages that read it: it refuses tokens that exist already.
    priority: FIRST + 2
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    shell:
        "python -m workflow.scripts.extend_model --config {input.settings:q} --model {input.model[0]:q}"
        " --output {output:q} --log {log:q}"

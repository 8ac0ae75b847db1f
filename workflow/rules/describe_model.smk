rule describe_model:
    input:
        model=from_run(model_files),
    output:
        "results/models/{model}/description.json",
    log:
        "logs/describe_model/{model}.log",
    # The first of all stages: it refuses a model before anything else has ended.
    priority: FIRST + 2
    conda:
        "../../envs/torch.yaml"
    threads: one_core
    params:
        checks=model_checks,
    shell:
        "python -m workflow.scripts.describe_model --model {input.model[0]:q}"
        " --checks {params.checks:q} --output {output:q} --log {log:q}"

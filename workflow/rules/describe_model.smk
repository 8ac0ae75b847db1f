rule describe_model:
    input:
        model=lambda w: model_files(BY_MODEL[w.model]),
    output:
        "results/models/{model}/description.json",
    log:
        "logs/describe_model/{model}.log",
    # The first of all stages: it refuses a model before anything else runs.
    priority: FIRST + 2
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    params:
        model=lambda w: located(layout.model_dir(BY_MODEL[w.model])),
        # Not recorded, since derived from `output`: it does not change the description.
        checks=lambda w, output: checks(
            layout.description, f"results/models/{w.model}/description.json"
        ),
    shell:
        "python -m workflow.scripts.describe_model --model {params.model:q}"
        " --checks {params.checks:q} --output {output:q} --log {log:q}"

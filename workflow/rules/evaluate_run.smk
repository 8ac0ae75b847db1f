rule evaluate_run:
    input:
        unpack(lambda w: form_inputs(w.run, RUNS[w.run].subjects)),
        base=lambda w: layout.base_dir(RUNS[w.run]),
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        weights="results/runs/{run}/consolidate/adapter/adapter_model.safetensors",
        scores=lambda w: evaluated_scores(w.run),
        tokens=lambda w: manifest(RUNS[w.run]),
        arrays=lambda w: layout.token_arrays(RUNS[w.run]),
        tasks=lambda w: task_files(RUNS[w.run]),
        chat_template=lambda w: users(RUNS[w.run].data.chat_template),
    # A file per subject, by the settings.
    output:
        directory("results/runs/{run}/evaluate_run"),
    log:
        "logs/evaluate_run/{run}.log",
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[w.run])
    resources:
        gpu=lambda w: cards(RUNS[w.run]),
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        # Snakemake compares this. It does not record params derived from `output`.
        recorded=lambda w: layout.recorded_json("evaluate_run", RUNS[w.run]),
        config=lambda w, output: layout.stage_json("evaluate_run", RUNS[w.run]),
        adapter=subpath(input.weights, parent=True),
        tokens=subpath(input.tokens, parent=True),
        # Not an output: Snakemake would delete earlier measurements.
        archive=placed(layout.EVALUATIONS),
        subjects=lambda w: list(RUNS[w.run].subjects),
        served=lambda w: RUNS[w.run].served,
        models=lambda w, input: evaluated_options(RUNS[w.run], input),
        chat_template=lambda w, input: (
            ["--chat-template", *input.chat_template] if input.chat_template else []
        ),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.evaluate_run --config {params.config:q} --run {wildcards.run:q}"
        " --base {input.base:q} {params.chat_template:q} --adapter {params.adapter:q} --tokens {params.tokens:q}"
        " --archive {params.archive:q} {params.models:q} --subjects {params.subjects:q} --served {params.served:q}"
        " --output {output:q} --log {log:q}"

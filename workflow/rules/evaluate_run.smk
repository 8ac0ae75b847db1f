rule evaluate_run:
    input:
        unpack(form_inputs(lambda run: run.subjects)),
        settings=settings("evaluate_run"),
        base=from_run(layout.base_dir),
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        scores=lambda w: scores_folder(w) if run_of(w).evaluate.heldout else [],
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
        tasks=only(
            lambda run: run.evaluate.tasks_dir,
            lambda run: local_inputs(run.evaluate.tasks_dir, layout.TASK_PATTERNS),
        ),
        chat_template=from_run(lambda run: optional_input(run.data.chat_template)),
    # A file per subject, by the settings.
    output:
        directory("results/runs/{run}/evaluate_run"),
    log:
        "logs/evaluate_run/{run}.log",
    benchmark:
        "results/benchmarks/evaluate_run/{run}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
        forms=form_options,
        free_settings=free_settings("evaluate_run"),
        # Not an output: Snakemake would delete earlier measurements.
        archive=with_prefix(layout.EVALUATIONS),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.evaluate_run --config {input.settings:q} {params.free_settings:q}"
        " --run {wildcards.run:q} --base {input.base:q} --chat-template {input.chat_template:q}"
        " --adapter {input.adapter[0]:q} --tokens {input.tokens:q} --archive {params.archive:q}"
        " {params.forms:q} --scores {input.scores:q} --output {output:q} --log {log:q}"

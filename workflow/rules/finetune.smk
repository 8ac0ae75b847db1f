rule finetune:
    input:
        settings=settings("finetune"),
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
        base=from_run(layout.base_dir),
        model=from_run(model_files),
        start=from_run(start_files),
        scores=scores_folder,
    output:
        adapter=directory("results/runs/{run}/finetune/adapter"),
        adapter_config="results/runs/{run}/finetune/adapter_config.json",
        metrics="results/runs/{run}/finetune/metrics.jsonl",
        parity="results/runs/{run}/finetune/parity.safetensors",
        summary="results/runs/{run}/finetune/summary.json",
    log:
        "logs/finetune/{run}.log",
    benchmark:
        "results/benchmarks/finetune/{run}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        # Of all nodes; the other resources are those of Slurm's mpi jobs.
        gpu=from_run(lambda run: gpus_per_node(run) * run.hardware.nodes or None),
        nodes=several_nodes(lambda run: run.hardware.nodes),
        tasks=several_nodes(lambda run: run.hardware.nodes),
        tasks_per_gpu=several_nodes(lambda run: 0),
        mpi=several_nodes(lambda run: "srun"),
        mem_mb=requested("mem_mb", TRAINING),
        runtime=requested("runtime", TRAINING),
    params:
        folder=subpath(output.summary, parent=True),
        # Not an output: Snakemake deletes the outputs of a job that failed.
        checkpoints=checkpoint_folder,
        model=from_run(lambda run: made_or_own(layout.model_dir(run))),
        # If it is missing, the model is described anew.
        description=from_run(lambda run: with_prefix(layout.description(run))),
        # The plan is made for the machine and the hardware settings of this start, which do not change the result.
        # (Not preflight.json as ancient() input: while that is remade, Snakemake 9.27 does not check whether later
        # jobs have changed themselves.)
        plan_settings=plan_settings,
        free_settings=free_settings("finetune"),
        tracking=subpath(output.summary, ancestor=4),
        # Not {resources.gpu}: Snakemake silently lowers a request above its limit.
        gpus=from_run(gpus_per_node),
        srun=srun,
    # exec: a signal to the job reaches the launcher, which saves, and not a shell that dies first.
    shell:
        "python -m workflow.scripts.preflight_run --config {params.plan_settings:q} --run {wildcards.run:q}"
        " --model {params.model:q} --description {params.description:q} --tokens {input.tokens:q}"
        " --base {input.base:q} --output {params.checkpoints:q}/plan.json --brief --log {log:q}"
        " && exec {params.srun:q} python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.finetune --config {input.settings:q} {params.free_settings:q}"
        " --run {wildcards.run:q} --base {input.base:q} --tokens {input.tokens:q}"
        " --preflight {params.checkpoints:q}/plan.json --start {input.start:q} --scores {input.scores:q}"
        " --checkpoints {params.checkpoints:q} --tracking {params.tracking:q} --output {params.folder:q} --log {log:q}"

rule finetune:
    input:
        tokens=lambda w: manifest(RUNS[w.run]),
        arrays=lambda w: layout.token_arrays(RUNS[w.run]),
        base=lambda w: layout.base_dir(RUNS[w.run]),
        model=lambda w: model_files(RUNS[w.run]),
        start=lambda w: start_files(RUNS[w.run]),
        scores=lambda w: scores_folder(w.run),
    output:
        adapter=directory("results/runs/{run}/finetune/adapter"),
        adapter_config="results/runs/{run}/finetune/adapter_config.json",
        metrics="results/runs/{run}/finetune/metrics.jsonl",
        parity="results/runs/{run}/finetune/parity.safetensors",
        summary="results/runs/{run}/finetune/summary.json",
    log:
        "logs/finetune/{run}.log",
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[w.run])
    resources:
        # Of all nodes; the other resources are those of Slurm's mpi jobs.
        gpu=lambda w: gpus(RUNS[w.run]) * RUNS[w.run].hardware.nodes or None,
        nodes=lambda w: several_nodes(RUNS[w.run], RUNS[w.run].hardware.nodes),
        tasks=lambda w: several_nodes(RUNS[w.run], RUNS[w.run].hardware.nodes),
        tasks_per_gpu=lambda w: several_nodes(RUNS[w.run], 0),
        mpi=lambda w: several_nodes(RUNS[w.run], "srun"),
        mem_mb=requested("mem_mb", TRAINING),
        runtime=requested("runtime", TRAINING),
    params:
        # Snakemake compares this. It does not record params derived from `output`.
        recorded=lambda w: layout.recorded_json("finetune", RUNS[w.run]),
        config=lambda w, output: layout.stage_json("finetune", RUNS[w.run]),
        folder=subpath(output.summary, parent=True),
        # Not an output: Snakemake deletes the outputs of a job that failed.
        checkpoints=checkpoint_folder,
        tokens=subpath(input.tokens, parent=True),
        model=lambda w: located(layout.model_dir(RUNS[w.run])),
        # Other hardware does not change the result, so it must not rerun the training: params derived from
        # `output` are not recorded. (Not preflight.json as ancient() input: while that is remade, Snakemake
        # 9.27 does not check whether later jobs have changed themselves.)
        preflight=lambda w, output: layout.stage_json("preflight_run", RUNS[w.run]),
        # If it is missing, the model is described anew.
        description=lambda w, output: placed(layout.description(RUNS[w.run])),
        tracking=lambda w, output: layout.unrecorded_json("finetune", RUNS[w.run]),
        results=lambda w, output: placed("results"),
        start=lambda w, output: start_options(RUNS[w.run]),
        scores=lambda w, output: [
            x for folder in scores_folder(w.run) for x in ("--scores", placed(folder))
        ],
        # Not {resources.gpu}: Snakemake silently lowers a request above its limit.
        gpus=lambda w, output: gpus(RUNS[w.run]),
        srun=lambda w, output, threads: on_each_node(RUNS[w.run], threads),
    # The plan is made here for the machine and the hardware settings of this start.
    # exec: a signal to the job reaches the launcher, which saves, and not a shell that dies first.
    shell:
        "python -m workflow.scripts.preflight_run --config {params.preflight:q} --run {wildcards.run:q}"
        " --model {params.model:q} --description {params.description:q} --tokens {input.tokens:q} --output {params.checkpoints:q}/plan.json --brief --log {log:q}"
        " && exec {params.srun:q} python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.finetune --config {params.config:q} --run {wildcards.run:q}"
        " --base {input.base:q} --tokens {params.tokens:q} --preflight {params.checkpoints:q}/plan.json"
        " {params.start:q} {params.scores:q}"
        " --checkpoints {params.checkpoints:q} --output {params.folder:q}"
        " --tracking {params.tracking:q} --tracking-folder {params.results:q} --log {log:q}"

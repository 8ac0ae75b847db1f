# Steps of `export.steps` have a checkpoint after the run, if the run reached them. Any other step of a command
# (`snakemake results/runs/RUN/export_step/STEP`) needs an existing one: it starts no training.
rule export_step:
    input:
        tokens=lambda w: manifest(RUNS[w.run]),
        base=lambda w: layout.base_dir(RUNS[w.run]),
        model=lambda w: model_files(RUNS[w.run]),
        start=lambda w: start_files(RUNS[w.run]),
        scores=lambda w: scores_folder(w.run),
        finetune=lambda w: of_runs("finetune", "summary.json", names=[w.run]) if is_kept(w) else [],
    output:
        directory("results/runs/{run}/export_step/{step}"),
    log:
        "logs/export_step/{run}-{step}.log",
    wildcard_constraints:
        step=r"[1-9]\d*",
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        config=lambda w: layout.stage_json("export_step", RUNS[w.run]),
        checkpoints=checkpoint_folder,
        adapter_config=lambda w, input: f"{checkpoint_folder(w, input)}/adapter_config.json",
        model=lambda w: located(layout.model_dir(RUNS[w.run])),
        summary=lambda w, input, output: ["--summary", input.finetune] if input.finetune else [],
    shell:
        "python -m workflow.scripts.export_step --config {params.config:q} --step {wildcards.step}"
        " --checkpoints {params.checkpoints:q} --adapter-config {params.adapter_config:q}"
        " --base {input.base:q} --model {params.model:q} --manifest {input.tokens:q}"
        " {params.summary:q} --output {output:q} --log {log:q}"

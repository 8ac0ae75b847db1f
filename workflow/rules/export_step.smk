# Steps of `export.steps` have a checkpoint after the run, if the run reached them. Any other step of a command
# (`snakemake results/runs/RUN/export_step/STEP`) needs an existing one: it starts no training.
rule export_step:
    input:
        settings=settings("export_step"),
        tokens=from_run(manifest),
        base=from_run(layout.base_dir),
        model=from_run(model_files),
        start=from_run(start_files),
        scores=scores_folder,
        finetune=lambda w: (
            of_runs("finetune", "summary.json", names=[w.run])
            if int(w.step) in run_of(w).export.steps
            else []
        ),
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
        checkpoints=checkpoint_folder,
    shell:
        "python -m workflow.scripts.export_step --config {input.settings:q} --step {wildcards.step}"
        " --checkpoints {params.checkpoints:q} --base {input.base:q} --model {input.model[0]:q}"
        " --manifest {input.tokens:q} --summary {input.finetune:q} --output {output:q} --log {log:q}"

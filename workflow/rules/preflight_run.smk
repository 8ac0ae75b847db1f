rule preflight_run:
    input:
        settings=settings("preflight_run"),
        description=from_run(layout.description),
        manifest=from_run(planned_manifest),
        sensitivities=from_run(sensitivities),
        base=from_run(base_of_start),
    output:
        "results/runs/{run}/preflight_run/preflight.json",
    log:
        "logs/preflight_run/{run}.log",
    priority: FIRST
    conda:
        "../../envs/torch.yaml"
    threads: preflight_cores
    params:
        free_settings=free_settings("preflight_run"),
        # Answers are sampled later.
        of_prompts=from_run(lambda run: ["--of-prompts"] if run.samples else []),
    shell:
        "python -m workflow.scripts.preflight_run --config {input.settings:q} {params.free_settings:q}"
        " --run {wildcards.run:q} --model {input.description:q} --tokens {input.manifest:q} {params.of_prompts}"
        " --sensitivities {input.sensitivities:q} --base {input.base:q} --output {output:q} --log {log:q}"

# After all other stages of all runs, also the report: Snakemake starts no further job after a failure.
rule require_gain:
    input:
        evaluation=lambda w: evaluations(),
        cards=lambda w: of_runs("consolidate", "adapter/README.md", names=going_on(WHOLE)),
        rungs=lambda w: decisions(),
        page=rules.render_report.output.page,
    output:
        "results/requirements.json",
    log:
        "logs/require_gain/requirements.log",
    conda:
        "../../envs/report.yaml"
    params:
        config=lambda w: json.dumps(
            {name: REQUIRED[name] for name in going_on(REQUIRED)}, sort_keys=True
        ),
        folder=lambda w, input: subpath(input.evaluation[0], ancestor=2),
    shell:
        "python -m workflow.scripts.require_gain --config {params.config:q} --runs-dir {params.folder:q}"
        " --output {output:q} --log {log:q}"

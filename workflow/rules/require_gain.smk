# After all other stages of all runs, also the report: Snakemake starts no further job after a failure.
rule require_gain:
    input:
        evaluation=evaluations(),
        cards=of_runs("consolidate", "adapter/README.md", names=RUNS),
        page=rules.render_report.output.page,
    output:
        "results/requirements.json",
    log:
        "logs/require_gain/requirements.log",
    conda:
        "../../envs/report.yaml"
    params:
        config=json.dumps(REQUIRED, sort_keys=True),
        folder=lambda w, input: subpath(input.evaluation[0], ancestor=2),
    shell:
        "python -m workflow.scripts.require_gain --config {params.config:q} --runs-dir {params.folder:q}"
        " --output {output:q} --log {log:q}"

# After all other stages of all runs, also the report: Snakemake starts no further job after a failure.
rule require_gain:
    input:
        settings=settings("require_gain", lambda _: REQUIRED),
        evaluation=EVALUATED,
        cards=of_runs("consolidate", "adapter/README.md", names=RUNS),
        page=rules.render_report.output.page,
    output:
        "results/requirements.json",
    log:
        "logs/require_gain/requirements.log",
    conda:
        "../../envs/report.yaml"
    params:
        results=subpath(input.page, ancestor=2),
    shell:
        "python -m workflow.scripts.require_gain --config {input.settings:q} --runs-dir {params.results:q}/runs"
        " --output {output:q} --log {log:q}"

# After everything else of all runs, the report too: Snakemake starts no further job once one has failed.
rule require_gain:
    input:
        evaluations(),
        expand(rules.write_card.output, run=RUNS),
        rules.render_report.output.page,
    output:
        "results/requirements.json",
    log:
        "logs/require_gain/requirements.log",
    conda:
        "../../envs/report.yaml"
    params:
        config=json.dumps(REQUIRED, sort_keys=True),
    shell:
        "python -m workflow.scripts.require_gain --config {params.config:q} --runs-dir results/runs"
        " --output {output:q} --log {log:q}"

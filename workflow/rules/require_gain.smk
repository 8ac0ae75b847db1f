# The last stage, and the least urgent: what it refuses is made, kept and reported all the same.
rule require_gain:
    input:
        expand("results/runs/{run}/evaluate_run/tuned.json", run=REQUIRED),
    output:
        "results/requirements.json",
    log:
        "logs/require_gain/requirements.log",
    conda:
        "../../envs/report.yaml"
    priority: -FIRST
    params:
        config=json.dumps(REQUIRED, sort_keys=True),
    shell:
        "python -m workflow.scripts.require_gain --config {params.config:q} --runs-dir results/runs"
        " --output {output:q} --log {log:q}"

rule render_report:
    input:
        preflight=expand("results/runs/{run}/preflight_run/preflight.json", run=RUNS),
        summary=expand("results/runs/{run}/finetune/summary.json", run=RUNS),
        metrics=expand("results/runs/{run}/finetune/metrics.jsonl", run=RUNS),
        parity=expand("results/runs/{run}/consolidate/parity.json", run=RUNS),
        evaluation=evaluations(),
        gguf=[layout.stage_dir(name, "convert_gguf") for name in IN_GGUF],
        tokens=[manifest(run) for run in RUNS.values()],
    output:
        page="results/report/report.html",
        comparison="results/report/comparison.csv",
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        # The report shows how to make all of it again: the settings of every run that differ from the defaults.
        config=lambda w, output: layout.report_json(REPORT, RUNS),
        recorded=layout.recorded_report_json(REPORT, RUNS),  # what Snakemake compares
        runs=lambda w, input: json.dumps(
            [
                {
                    "folder": subpath(summary, ancestor=2),
                    "tokens": subpath(manifest, parent=True),
                    "gguf": name in IN_GGUF,
                }
                for name, summary, manifest in zip(RUNS, input.summary, input.tokens, strict=True)
            ]
        ),
    shell:
        "python -m workflow.scripts.render_report --config {params.config:q} --runs {params.runs:q}"
        " --output {output.page:q} --comparison {output.comparison:q} --log {log:q}"

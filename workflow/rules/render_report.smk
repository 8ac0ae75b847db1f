rule render_report:
    input:
        preflight=expand("results/runs/{run}/preflight_run/preflight.json", run=NAMED),
        summary=expand("results/runs/{run}/finetune/summary.json", run=NAMED),
        metrics=expand("results/runs/{run}/finetune/metrics.jsonl", run=NAMED),
        parity=expand("results/runs/{run}/consolidate/parity.json", run=NAMED),
        evaluation=evaluations(),
        gguf=[layout.stage_dir(name, "convert_gguf") for name in IN_GGUF],
        served=[served_check(name) for name in SERVED],
        tokens=[manifest(run) for run in NAMED.values()],
    output:
        page="results/report/report.html",
        comparison="results/report/comparison.csv",
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        # The report shows how to make all of it again: the settings of every run that differ from the defaults.
        config=lambda w, output: layout.report_json(REPORT, NAMED),
        recorded=layout.recorded_report_json(REPORT, NAMED),  # what Snakemake compares
        runs=lambda w, input: json.dumps(
            [
                {
                    "folder": subpath(summary, ancestor=2),
                    "tokens": subpath(manifest, parent=True),
                    "gguf": name in IN_GGUF,
                    "served": name in SERVED,
                }
                for name, summary, manifest in zip(NAMED, input.summary, input.tokens, strict=True)
            ]
        ),
    shell:
        "python -m workflow.scripts.render_report --config {params.config:q} --runs {params.runs:q}"
        " --output {output.page:q} --comparison {output.comparison:q} --log {log:q}"

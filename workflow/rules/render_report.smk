rule render_report:
    input:
        preflight=of_runs("preflight_run", "preflight.json", names=RUNS),
        summary=of_runs("finetune", "summary.json", names=RUNS),
        metrics=of_runs("finetune", "metrics.jsonl", names=RUNS),
        parity=of_runs("consolidate", "parity.json", names=RUNS),
        evaluation=evaluations(),
        gguf=[layout.folder_of_form(name, "gguf") for name in EXPORTING["gguf"]],
        served=[served_check(name) for name in SERVED],
        tokens=[manifest(RUNS[name]) for name in RUNS],
    output:
        page="results/report/report.html",
        comparison="results/report/comparison.csv",
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        # The report shows every run's settings that differ from the defaults, with which it can be reproduced.
        config=lambda w, output: layout.report_json(REPORT, RUNS),
        recorded=layout.recorded_report_json(REPORT, RUNS),  # Snakemake compares this
        runs=lambda w, input: json.dumps(
            [
                {
                    "folder": subpath(summary, ancestor=2),
                    "tokens": subpath(manifest, parent=True),
                    "gguf": name in EXPORTING["gguf"],
                    "served": name in SERVED,
                }
                for name, summary, manifest in zip(RUNS, input.summary, input.tokens, strict=True)
            ]
        ),
    shell:
        "python -m workflow.scripts.render_report --config {params.config:q} --runs {params.runs:q}"
        " --output {output.page:q} --comparison {output.comparison:q} --log {log:q}"

rule render_report:
    input:
        preflight=lambda w: of_runs("preflight_run", "preflight.json", names=going_on(NAMED)),
        summary=lambda w: of_runs("finetune", "summary.json", names=going_on(NAMED)),
        metrics=lambda w: of_runs("finetune", "metrics.jsonl", names=going_on(NAMED)),
        parity=lambda w: of_runs("consolidate", "parity.json", names=going_on(NAMED)),
        evaluation=lambda w: evaluations(),
        gguf=lambda w: [layout.stage_dir(name, "convert_gguf") for name in going_on(IN_GGUF)],
        served=lambda w: [served_check(name) for name in going_on(SERVED)],
        tokens=lambda w: [manifest(RUNS[name]) for name in going_on(NAMED)],
        rungs=lambda w: decisions(),
    output:
        page="results/report/report.html",
        comparison="results/report/comparison.csv",
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        # The report shows every run's settings that differ from the defaults, with which it can be reproduced.
        config=lambda w, output: layout.report_json(REPORT, NAMED, SWEEP),
        recorded=layout.recorded_report_json(REPORT, NAMED, SWEEP),  # Snakemake compares this
        runs=lambda w, input: json.dumps(
            [
                {
                    "folder": subpath(summary, ancestor=2),
                    "tokens": subpath(manifest, parent=True),
                    "gguf": name in IN_GGUF,
                    "served": name in SERVED,
                }
                for name, summary, manifest in zip(
                    going_on(NAMED), input.summary, input.tokens, strict=True
                )
            ]
        ),
        rungs=lambda w, input: ["--rungs", *input.rungs] if input.rungs else [],
    shell:
        "python -m workflow.scripts.render_report --config {params.config:q} --runs {params.runs:q} {params.rungs:q}"
        " --output {output.page:q} --comparison {output.comparison:q} --log {log:q}"

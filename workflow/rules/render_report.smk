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
        page=report(
            "results/report/report.html",
            caption="../report/captions/page.rst",
            category="Report",
            labels={"artifact": "report over all runs"},
        ),
        comparison=report(
            "results/report/comparison.csv",
            caption="../report/captions/comparison.rst",
            category="Report",
            labels={"artifact": "table of all runs"},
        ),
        figures=report(
            directory("results/report/figures"),
            patterns=["{figure}.png"],
            caption="../report/captions/figure.rst",
            category="Report",
            labels={"artifact": "figure: {figure}"},
        ),
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        # The report shows how to make all of it again: the settings of every run that differ from the defaults.
        config=lambda w, output: layout.report_json(REPORT, RUNS),
        recorded=layout.recorded_report_json(REPORT, RUNS),  # what Snakemake compares
        folder=lambda w, input: subpath(input.summary[0], ancestor=3),
        runs=[part for name in RUNS for part in ("--run", name)],
        gguf=["--gguf", *IN_GGUF] if IN_GGUF else [],
        tokens=lambda w, input: [
            part
            for name, manifest in zip(RUNS, input.tokens, strict=True)
            for part in ("--tokens", f"{name}={subpath(manifest, parent=True)}")
        ],
    shell:
        "python -m workflow.scripts.render_report --config {params.config:q} --runs-dir {params.folder:q}"
        " {params.runs:q} {params.tokens:q} {params.gguf:q} --output {output.page:q}"
        " --comparison {output.comparison:q} --figures {output.figures:q} --log {log:q}"

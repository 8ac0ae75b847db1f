rule render_report:
    input:
        settings=settings("render_report", reported_settings),
        preflight=of_runs("preflight_run", "preflight.json", names=RUNS),
        summary=of_runs("finetune", "summary.json", names=RUNS),
        metrics=of_runs("finetune", "metrics.jsonl", names=RUNS),
        parity=of_runs("consolidate", "parity.json", names=RUNS),
        evaluation=EVALUATED,
        gguf=[layout.folder_of_form(name, "gguf") for name in EXPORTING["gguf"]],
        conversions=[
            f"{layout.folder_of_form(name, form)}.json"
            for form in CONVERTED
            for name in EXPORTING[form]
        ],
        served=of_runs("check_served", "served.json", names=SERVED),
        tokens=[manifest(RUNS[name]) for name in RUNS],
        rewards=[layout.rewards_file(run) for run in ANSWERED],
        answers=[layout.answers_dir(run) for run in SAMPLING],
    output:
        page=report("results/report/report.html", caption="../report/page.rst", category="All runs"),
        comparison=report(
            "results/report/comparison.csv",
            caption="../report/comparison.rst",
            category="All runs",
        ),
    log:
        "logs/render_report/report.log",
    conda:
        "../../envs/report.yaml"
    params:
        free_settings=free_settings("render_report", lambda _: layout.free_report_settings(RUNS)),
    shell:
        "python -m workflow.scripts.render_report --config {input.settings:q} {params.free_settings:q}"
        " --output {output.page:q} --comparison {output.comparison:q} --log {log:q}"

# A stage of its own, so that the card in the adapter's folder has the evaluation's results.
rule write_card:
    input:
        settings=settings("write_card"),
        summary=rules.finetune.output.summary,
        adapter_config="results/runs/{run}/consolidate/adapter/adapter_config.json",
        base=from_run(layout.base_dir),
        manifest=from_run(manifest),
        parity="results/runs/{run}/consolidate/parity.json",
        evaluation="results/runs/{run}/evaluate_run",
        gguf=only(attrgetter("export.gguf"), "results/runs/{run}/convert_gguf"),
        served=only(
            lambda run: run.export.serve != "none", "results/runs/{run}/check_served/served.json"
        ),
    output:
        report(
            "results/runs/{run}/consolidate/adapter/README.md",
            caption="../report/card.rst",
            category="Model cards",
            labels={"run": "{run}"},
        ),
    log:
        "logs/write_card/{run}.log",
    conda:
        "../../envs/torch.yaml"
    shell:
        "python -m workflow.scripts.write_card --config {input.settings:q} --summary {input.summary:q}"
        " --adapter-config {input.adapter_config:q} --base {input.base:q} --manifest {input.manifest:q}"
        " --parity {input.parity:q} --evaluation {input.evaluation:q} --gguf {input.gguf:q}"
        " --served {input.served:q} --output {output:q} --log {log:q}"

# A checkpoint: after the decision Snakemake evaluates again which runs train further.
checkpoint decide_rung:
    input:
        before=lambda w: decisions(before=int(w.steps)),
        evaluation=lambda w: [layout.stage_dir(name, "evaluate_run") for name in at_rung(w.steps)],
        summary=lambda w: of_runs("finetune", "summary.json", names=at_rung(w.steps)),
    output:
        "results/sweep/rung-{steps}.json",
    log:
        "logs/decide_rung/rung-{steps}.log",
    wildcard_constraints:
        steps=any_of(map(str, SWEEP.rungs[:-1])),
    conda:
        "../../envs/torch.yaml"
    params:
        config=lambda w: json.dumps(
            {
                "keep": SWEEP.keep,
                "continued": {
                    RUNS[name].rung_of: RUNS[name].train.begins_longer_runs
                    for name in at_rung(w.steps)
                },
            }
        ),
    shell:
        "python -m workflow.scripts.decide_rung --config {params.config:q} --steps {wildcards.steps}"
        " --evaluations {input.evaluation:q} --summaries {input.summary:q} --output {output:q} --log {log:q}"

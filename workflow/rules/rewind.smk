# No part of `all`: `snakemake --cores 1 rewind --config rewind=RUN@STEP`. The inputs identify the run's checkpoints.
rule rewind:
    input:
        tokens=lambda w: manifest(RUNS[rewound()[0]]),
        base=lambda w: layout.base_dir(RUNS[rewound()[0]]),
        start=lambda w: start_files(RUNS[rewound()[0]]),
        scores=lambda w: scores_folder(rewound()[0]),
    log:
        "logs/rewind/rewind.log",
    conda:
        "../../envs/torch.yaml"
    params:
        checkpoints=lambda w, input: checkpoints_of(rewound()[0], input),
        step=lambda w: rewound()[1],
        results=lambda w: placed(layout.stage_dir(rewound()[0], "finetune")),
    shell:
        "python -m workflow.scripts.rewind --checkpoints {params.checkpoints:q} --step {params.step}"
        " --results {params.results:q} --log {log:q}"

rule quantize_base:
    input:
        model=lambda w: model_files(BY_BASE[w.base]),
    output:
        directory("results/base/{base}"),
    log:
        "logs/quantize_base/{base}.log",
    conda:
        "../../envs/torch.yaml"
    resources:
        accelerator=1,
    params:
        config=lambda w: layout.stage_json("quantize_base", BY_BASE[w.base]),
        model=lambda w: layout.model_dir(BY_BASE[w.base]),
    shell:
        "python -m workflow.scripts.quantize_base --config {params.config:q}"
        " --model {params.model:q} --output {output:q} --log {log:q}"

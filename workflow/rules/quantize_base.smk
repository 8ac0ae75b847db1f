rule quantize_base:
    input:
        model=lambda w: model_files(BY_BASE[w.base]),
        # With absmax none: then a base does not wait for tokens.
        calibration=lambda w: layout.calibration_files(BY_BASE[w.base]),
    output:
        directory("results/base/{base}"),
    log:
        "logs/quantize_base/{base}.log",
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(BY_BASE[w.base], most=1)
    resources:
        gpu=lambda w: cards(BY_BASE[w.base], most=1),
        mem_mb=lambda w, input, attempt: asked(
            "mem_mb", cluster_request.quantizing, input, attempt, run=BY_BASE[w.base]
        ),
        runtime=lambda w, input, attempt: asked(
            "runtime", cluster_request.quantizing, input, attempt, run=BY_BASE[w.base]
        ),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.stage_json("quantize_base", BY_BASE[w.base]),
        model=lambda w, input: model_folder(BY_BASE[w.base], input.model),
        tokens=lambda w: layout.tokens_dir(BY_BASE[w.base]),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.quantize_base --config {params.config:q}"
        " --model {params.model:q} --tokens {params.tokens:q} --output {output:q} --log {log:q}"

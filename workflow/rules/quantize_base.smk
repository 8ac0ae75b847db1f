rule quantize_base:
    input:
        model=lambda w: model_files(BY_BASE[w.base]),
        # Neither with absmax: then a base does not wait for tokens.
        tokens=lambda w: layout.calibration_tokens(BY_BASE[w.base]),
        text=lambda w: users(layout.calibration_text(BY_BASE[w.base])),
    output:
        directory("results/base/{base}"),
    log:
        "logs/quantize_base/{base}.log",
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(BY_BASE[w.base], most=1)
    resources:
        gpu=lambda w: cards(BY_BASE[w.base], most=1),
        mem_mb=requested("mem_mb", cluster_request.quantizing, lambda w: BY_BASE[w.base]),
        runtime=requested("runtime", cluster_request.quantizing, lambda w: BY_BASE[w.base]),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.recorded_json("quantize_base", BY_BASE[w.base]),
        model=lambda w: located(layout.model_dir(BY_BASE[w.base])),
        tokens=lambda w, input: [
            part for file in input.tokens[:1] for part in ("--tokens", subpath(file, parent=True))
        ],
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.quantize_base --config {params.config:q}"
        " --model {params.model:q} {params.tokens:q} --output {output:q} --log {log:q}"

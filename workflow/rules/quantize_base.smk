rule quantize_base:
    input:
        settings=settings("quantize_base"),
        model=from_run(model_files),
        # Neither with absmax: then a base does not wait for tokens.
        tokens=from_run(layout.calibration_tokens),
        text=from_run(lambda run: optional_input(layout.calibration_text(run))),
        # With quantize.keep: auto it decides what stays in 16 bits.
        preflight=bit_decision,
    output:
        directory("results/base/{base}"),
    log:
        "logs/quantize_base/{base}.log",
    benchmark:
        "results/benchmarks/quantize_base/{base}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: quantizing_cores
    resources:
        gpu=one_gpu,
        mem_mb=requested("mem_mb", cluster_request.quantizing),
        runtime=requested("runtime", cluster_request.quantizing),
    params:
        gpus=leased_gpus,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.quantize_base --config {input.settings:q}"
        " --model {input.model[0]:q} --tokens {input.tokens:q} --preflight {input.preflight:q}"
        " --output {output:q} --log {log:q}"

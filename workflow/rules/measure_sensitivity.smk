# Only for runs with quantize.keep: auto. Runs of a sweep share it.
rule measure_sensitivity:
    input:
        settings=settings("measure_sensitivity"),
        model=from_run(model_files),
        tokens=from_run(layout.measured_tokens),
        text=from_run(measured_text),
    output:
        "results/sensitivities/{sensitivities}.json",
    log:
        "logs/measure_sensitivity/{sensitivities}.log",
    benchmark:
        "results/benchmarks/measure_sensitivity/{sensitivities}.tsv"
    # Preflight of these runs waits for it.
    priority: FIRST
    conda:
        "../../envs/torch.yaml"
    threads: cores_of_one_gpu
    resources:
        gpu=measuring_gpu,
        mem_mb=requested("mem_mb", cluster_request.measuring),
        runtime=requested("runtime", cluster_request.measuring),
    params:
        gpus=leased_gpus,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.measure_sensitivity --config {input.settings:q}"
        " --model {input.model[0]:q} --tokens {input.tokens:q} --output {output:q} --log {log:q}"

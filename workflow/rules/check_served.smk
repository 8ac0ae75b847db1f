# The Python of vLLM's own environment (`make serving`).
rule check_served:
    input:
        unpack(form_inputs(lambda run: [run.served, *["gguf"] * (run.export.serve == "llama_cpp")])),
        settings=settings("check_served"),
        python=only(lambda run: run.export.serve == "vllm", layout.SERVING),
        evaluation="results/runs/{run}/evaluate_run",
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        parity="results/runs/{run}/consolidate/parity.json",
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
    output:
        "results/runs/{run}/check_served/served.json",
    log:
        "logs/check_served/{run}.log",
    benchmark:
        "results/benchmarks/check_served/{run}.tsv"
    wildcard_constraints:
        run=any_of(SERVED),
    conda:
        "../../envs/gguf.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
        forms=form_options,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.check_served --config {input.settings:q} --python {input.python:q}"
        " {params.forms:q}"
        " --adapter {input.adapter[0]:q} --parity {input.parity:q} --evaluation {input.evaluation:q}"
        " --tokens {input.tokens:q} --output {output:q} --log {log:q}"

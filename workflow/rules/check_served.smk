# The Python of vLLM's own environment (`make serving`).
rule check_served:
    input:
        unpack(lambda w: form_inputs(w.run, [RUNS[w.run].served])),
        server=lambda w: server(w.run),
        evaluation="results/runs/{run}/evaluate_run",
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        weights="results/runs/{run}/consolidate/adapter/adapter_model.safetensors",
        parity="results/runs/{run}/consolidate/parity.json",
        tokens=lambda w: manifest(RUNS[w.run]),
        arrays=lambda w: layout.token_arrays(RUNS[w.run]),
    output:
        "results/runs/{run}/check_served/served.json",
    log:
        "logs/check_served/{run}.log",
    wildcard_constraints:
        run=any_of(SERVED),
    conda:
        "../../envs/gguf.yaml"
    threads: lambda w: cores(RUNS[w.run])
    resources:
        gpu=lambda w: cards(RUNS[w.run]),
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.stage_json("check_served", RUNS[w.run]),
        server=lambda w: SERVER_OPTIONS[RUNS[w.run].export.serve],
        served=lambda w: RUNS[w.run].served,
        models=lambda w, input: form_options(RUNS[w.run], input),
        adapter=subpath(input.weights, parent=True),
        tokens=subpath(input.tokens, parent=True),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.check_served --config {params.config:q} {params.server} {input.server:q}"
        " --served {params.served:q} {params.models:q} --adapter {params.adapter:q} --parity {input.parity:q}"
        " --evaluation {input.evaluation:q} --tokens {params.tokens:q} --output {output:q} --log {log:q}"

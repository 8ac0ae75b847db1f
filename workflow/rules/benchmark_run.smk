# A case with a number of processes is a job; its row says so if it cannot run here, and nothing else waits for that.
rule benchmark_run:
    output:
        "results/benchmark/{benchmark}/{case}-x{processes}.jsonl",
    log:
        "logs/benchmark_run/{benchmark}/{case}-x{processes}.log",
    wildcard_constraints:
        case=r"[\w.-]+",
        processes=r"\d+",
    conda:
        "../../envs/torch.yaml"
    # One at a time: each is measured alone.
    threads: lambda w: workflow.cores
    resources:
        gpu=lambda w: benchmark_gpus(w) or None,
    params:
        config=lambda w: json.dumps(
            {"requests": [benchmark_request(w).document()]}, sort_keys=True
        ),
        gpus=lambda w, output: benchmark_gpus(w),
        # Not an output: a base serves many cases, and 70B parameters are 34 GiB.
        bases=lambda w, output: layout.BENCHMARK_BASES,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.benchmark_run --config {params.config:q}"
        " --bases {params.bases:q} --output {output:q} --log {log:q}"

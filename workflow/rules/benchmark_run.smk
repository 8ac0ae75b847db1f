def benchmark_requests():
    """What the benchmark measures on this machine."""
    return requests(BENCHMARK, num_gpus=len(visible_gpus()))


def benchmark_request(wildcards):
    """The measurement that a job makes."""
    label = f"{wildcards.case}-x{wildcards.processes}"
    return next(found for found in benchmark_requests() if found.label == label)


def benchmark_gpus(wildcards):
    """GPUs that a measurement gets; of more than there are, all, and its row says what is lacking."""
    there = len(visible_gpus())
    cuda = on_gpus(BENCHMARK, num_gpus=there)
    return min(int(wildcards.processes), there) if cuda else 0


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
        config=lambda w: json.dumps({"requests": [benchmark_request(w).document()]}, sort_keys=True),
        gpus=lambda w, output: benchmark_gpus(w),
        # Not an output: a base serves many cases, and 70B parameters are 34 GiB.
        bases=lambda w, output: layout.BENCHMARK_BASES,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.benchmark_run --config {params.config:q}"
        " --bases {params.bases:q} --output {output:q} --log {log:q}"

rule render_benchmark:
    input:
        lambda w: [
            f"results/benchmark/{w.benchmark}/{request.label}.jsonl"
            for request in benchmark_requests()
        ],
    output:
        directory("results/benchmark/{benchmark}/page"),
    log:
        "logs/render_benchmark/{benchmark}.log",
    conda:
        "../../envs/report.yaml"
    shell:
        "python -m workflow.scripts.render_benchmark --measurements {input:q} --output {output:q}"
        " --log {log:q}"

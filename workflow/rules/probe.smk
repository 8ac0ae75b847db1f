# Measures this machine's rates in the operations of a step; no part of `all`. Its file is named by device, driver and
# torch, so it is no output of the rule, which always runs.
rule probe:
    log:
        "logs/probe/probe.log",
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    params:
        processes=max(run.hardware.cpu_processes for run in RUNS.values()),
    shell:
        "python -m workflow.scripts.probe --processes {params.processes} --log {log:q}"

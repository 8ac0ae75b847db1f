# The merged model in another format, and the comparison of its readers.
rule convert_merged:
    input:
        settings=settings("convert_merged"),
        merged="results/runs/{run}/consolidate/merged",
        parity="results/runs/{run}/consolidate/parity.json",
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
    output:
        folder=directory("results/runs/{run}/convert_merged/{form}"),
        comparison="results/runs/{run}/convert_merged/{form}.json",
    log:
        "logs/convert_merged/{run}-{form}.log",
    benchmark:
        "results/benchmarks/convert_merged/{run}-{form}.tsv"
    wildcard_constraints:
        form=any_of(CONVERTED),
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.convert_merged --config {input.settings:q} --form {wildcards.form}"
        " --merged {input.merged:q} --parity {input.parity:q} --tokens {input.tokens:q}"
        " --output {output.folder:q} --comparison {output.comparison:q} --log {log:q}"

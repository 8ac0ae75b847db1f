ADAPTER_FILES = [
    "adapter_model.safetensors",
    "adapter_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "SHA256SUMS",
]


# Two rules, one stage: an exported merged model's folder is one more output.
rule consolidate:
    input:
        settings=settings("consolidate"),
        finetune=rules.finetune.output,
        summary=rules.finetune.output.summary,
        base=from_run(layout.base_dir),
        model=from_run(model_files),
        manifest=from_run(manifest),
    output:
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        parity="results/runs/{run}/consolidate/parity.json",
    log:
        "logs/consolidate/{run}.log",
    benchmark:
        "results/benchmarks/consolidate/{run}.tsv"
    wildcard_constraints:
        run=any_of(run for run in RUNS if run not in EXPORTING["merged"]),
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
        folder=subpath(output.parity, parent=True),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.consolidate --config {input.settings:q} --finetune {input.summary:q}"
        " --base {input.base:q} --model {input.model[0]:q} --manifest {input.manifest:q}"
        " --output {params.folder:q} --log {log:q}"


use rule consolidate as consolidate_and_merged with:
    output:
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        parity="results/runs/{run}/consolidate/parity.json",
        merged=directory("results/runs/{run}/consolidate/merged"),
    wildcard_constraints:
        run=any_of(EXPORTING["merged"]),

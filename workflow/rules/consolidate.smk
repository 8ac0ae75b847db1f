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
        finetune=rules.finetune.output,
        summary=rules.finetune.output.summary,
        base=lambda w: layout.base_dir(RUNS[w.run]),
        model=lambda w: model_files(RUNS[w.run]),
        manifest=lambda w: manifest(RUNS[w.run]),
    output:
        adapter=expand(
            "results/runs/{{run}}/consolidate/adapter/{file}",
            file=ADAPTER_FILES,
        ),
        parity="results/runs/{run}/consolidate/parity.json",
    log:
        "logs/consolidate/{run}.log",
    wildcard_constraints:
        run=any_of(run for run in RUNS if run not in EXPORTING["merged"]),
    conda:
        "../../envs/torch.yaml"
    threads: lambda w: cores(RUNS[w.run])
    resources:
        gpu=lambda w: cards(RUNS[w.run]),
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=lambda w, resources: resources.get("gpu", 0),
        config=lambda w: layout.stage_json("consolidate", RUNS[w.run]),
        finetune=subpath(input.summary, parent=True),
        folder=subpath(output.parity, parent=True),
        model=lambda w: located(layout.model_dir(RUNS[w.run])),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.consolidate --config {params.config:q} --finetune {params.finetune:q}"
        " --base {input.base:q} --model {params.model:q} --manifest {input.manifest:q}"
        " --output {params.folder:q} --log {log:q}"


use rule consolidate as consolidate_and_merged with:
    output:
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        parity="results/runs/{run}/consolidate/parity.json",
        merged=directory("results/runs/{run}/consolidate/merged"),
    wildcard_constraints:
        run=any_of(EXPORTING["merged"]),

def published_files(name):
    """What a run publishes, as inputs."""
    form, folder = RUNS[name].export.hub_form, layout.stage_dir(name, "consolidate")
    return {
        "adapter": [f"{folder}/adapter/{file}" for file in ADAPTER_FILES],
        "merged": [f"{folder}/merged"],
        "gguf": [layout.stage_dir(name, "convert_gguf")],
    }[form]


def published_folder(name, files):
    """The folder that a run publishes, once a job has `published_files`."""
    adapter = RUNS[name].export.hub_form == "adapter"
    return subpath(files[0], parent=True) if adapter else files[0]


def publications():
    """The proofs that runs are published: those that name a repository."""
    named = [name for name, run in RUNS.items() if run.export.hub_repo]
    if not named:
        raise WorkflowError(
            "export.hub_repo names no repository, so there is nothing to publish. Set it to owner/name."
        )
    return [f"{layout.stage_dir(name, 'publish_run')}/published.json" for name in named]


# No part of `all`: `snakemake publish` asks for it.
rule publish_run:
    input:
        weights=lambda w: published_files(w.run),
        card="results/runs/{run}/consolidate/adapter/README.md",
        summary="results/runs/{run}/finetune/summary.json",
        parity="results/runs/{run}/consolidate/parity.json",
        requirements=lambda w: requirements(),
    output:
        "results/runs/{run}/publish_run/published.json",
    log:
        "logs/publish_run/{run}.log",
    conda:
        "../../envs/torch.yaml"
    params:
        config=lambda w: layout.stage_json("publish_run", RUNS[w.run]),
        folder=lambda w, input: published_folder(w.run, input.weights),
    shell:
        "python -m workflow.scripts.publish_run --config {params.config:q} --run {wildcards.run:q}"
        " --folder {params.folder:q} --card {input.card:q} --summary {input.summary:q}"
        " --parity {input.parity:q} --output {output:q} --log {log:q}"

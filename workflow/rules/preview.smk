# Shows the tokens of the data on the terminal; no part of `all`. It has no output, so it always runs.
rule preview:
    input:
        settings=settings(
            "preview",
            lambda _: {
                "special_tokens_in_text": [
                    run.data.special_tokens_in_text for run in RUNS_OF["tokens"].values()
                ]
            },
        ),
        manifests=[planned_manifest(run) for run in RUNS_OF["tokens"].values()],
    log:
        "logs/preview/preview.log",
    conda:
        "../../envs/torch.yaml"
    shell:
        "python -m workflow.scripts.preview --config {input.settings:q} --manifests {input.manifests:q} --log {log:q}"

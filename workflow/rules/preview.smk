# Shows the tokens of the data on the terminal; no part of `all`. It has no output, so it always runs.
rule preview:
    input:
        [manifest(run) for run in BY_TOKENS.values()],
    log:
        "logs/preview/preview.log",
    conda:
        "../../envs/torch.yaml"
    params:
        config=json.dumps([run.data.special_tokens_in_text for run in BY_TOKENS.values()]),
    shell:
        "python -m workflow.scripts.preview --config {params.config:q} --manifests {input:q} --log {log:q}"

# No input: a certificate is compared with existing files, and nothing is made for it.
rule verify:
    log:
        "logs/verify/verify.log",
    conda:
        "../../envs/torch.yaml"
    params:
        options=lambda w: verified_options(),
    shell:
        "python -m workflow.scripts.verify {params.options:q} --log {log:q}"

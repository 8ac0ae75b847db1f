# The tokens of a round: best answers, pairs, or groups with advantages, as the objective needs.
rule pack_answers:
    input:
        settings=settings("pack_answers"),
        tokens=from_run(layout.rows_files),
        answers=from_run(layout.answers_dir),
        rewards=from_run(layout.rewards_file),
        earlier=from_run(layout.earlier_rewards),
        tokenizer=from_run(tokenizer_files),
    output:
        manifest="results/tokens/{packed}/manifest.json",
        arrays=expand("results/tokens/{{packed}}/{file}", file=layout.ARRAYS),
    log:
        "logs/pack_answers/{packed}.log",
    conda:
        "../../envs/torch.yaml"
    params:
        folder=subpath(output.manifest, parent=True),
    shell:
        "python -m workflow.scripts.pack_answers --config {input.settings:q} --tokens {input.tokens[0]:q}"
        " --answers {input.answers:q} --rewards {input.rewards:q} --earlier {input.earlier:q}"
        " --tokenizer {input.tokenizer[0]:q} --output {params.folder:q} --log {log:q}"

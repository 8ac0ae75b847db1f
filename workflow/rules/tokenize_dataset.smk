rule tokenize_dataset:
    input:
        data=lambda w: data_files(BY_TOKENS[w.tokens]),
        tokenizer=lambda w: model_files(BY_TOKENS[w.tokens], TOKENIZER_PATTERNS),
        chat_template=lambda w: users(BY_TOKENS[w.tokens].data.chat_template),
    output:
        manifest="results/tokens/{tokens}/manifest.json",
        arrays=expand("results/tokens/{{tokens}}/{file}", file=layout.ARRAYS),
        rejects="results/tokens/{tokens}/rejects.jsonl",
        truncated="results/tokens/{tokens}/truncated.jsonl",
    log:
        "logs/tokenize_dataset/{tokens}.log",
    priority: FIRST
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    params:
        # Snakemake compares this. It does not record params derived from `output`.
        recorded=lambda w: layout.recorded_json("tokenize_dataset", BY_TOKENS[w.tokens]),
        config=lambda w, output: layout.stage_json("tokenize_dataset", BY_TOKENS[w.tokens]),
        folder=subpath(output.manifest, parent=True),
        model=lambda w: located(layout.model_dir(BY_TOKENS[w.tokens])),
        dataset=lambda w: located(layout.dataset_dir(BY_TOKENS[w.tokens]) or "."),
    shell:
        "python -m workflow.scripts.tokenize_dataset --config {params.config:q}"
        " --dataset {params.dataset:q} --tokenizer {params.model:q}"
        " --output {params.folder:q} --processes {threads} --log {log:q}"

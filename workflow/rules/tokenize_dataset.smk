rule tokenize_dataset:
    input:
        settings=settings("tokenize_dataset"),
        data=from_run(data_inputs),
        tokenizer=from_run(tokenizer_files),
        chat_template=from_run(lambda run: optional_input(run.data.chat_template)),
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
    threads: tokenizing_cores
    params:
        free_settings=free_settings("tokenize_dataset"),
        folder=subpath(output.manifest, parent=True),
        dataset=from_run(dataset_folder),
    shell:
        "python -m workflow.scripts.tokenize_dataset --config {input.settings:q} {params.free_settings:q}"
        " --dataset {params.dataset:q} --tokenizer {input.tokenizer[0]:q}"
        " --output {params.folder:q} --processes {threads} --log {log:q}"

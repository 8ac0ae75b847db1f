# Only for runs that train on sampled answers: those of the base, or of vLLM the original, with the start adapter.
rule sample_answers:
    input:
        settings=settings("sample_answers"),
        tokens=from_run(layout.rows_files),
        data=from_run(data_inputs),
        chat_template=from_run(lambda run: optional_input(run.data.chat_template)),
        tokenizer=from_run(tokenizer_files),
        base=only(lambda run: not run.serves_answers, layout.base_dir),
        model=only(attrgetter("serves_answers"), model_files),
        python=only(attrgetter("serves_answers"), layout.SERVING),
        start=from_run(start_files),
    output:
        directory("results/answers/{answers}"),
    log:
        "logs/sample_answers/{answers}.log",
    benchmark:
        "results/benchmarks/sample_answers/{answers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: cores
    resources:
        gpu=gpus_of_job,
        mem_mb=requested("mem_mb", READING),
        runtime=requested("runtime", READING),
    params:
        gpus=leased_gpus,
        dataset=from_run(dataset_folder),
    shell:
        "python -m workflow.scripts.lease_gpus --count {params.gpus} --log {log:q} --"
        " python -m workflow.scripts.sample_answers --config {input.settings:q} --base {input.base:q}"
        " --model {input.model:q} --python {input.python:q} --start {input.start:q} --tokens {input.tokens[0]:q} --tokenizer {input.tokenizer[0]:q}"
        " --dataset {params.dataset:q} --output {output:q} --log {log:q}"

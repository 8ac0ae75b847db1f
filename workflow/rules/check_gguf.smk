# Before all long stages, and no input of the training, which it must not rerun.
rule check_gguf:
    input:
        settings=settings("check_gguf"),
        model=from_run(model_files),
        converter=only(lambda run: not run.export.llama_cpp, layout.CONVERTERS),
    output:
        "results/runs/{run}/check_gguf/check.json",
    log:
        "logs/check_gguf/{run}.log",
    wildcard_constraints:
        run=any_of(EXPORTING["gguf"]),
    priority: FIRST + 2
    conda:
        "../../envs/gguf.yaml"
    shell:
        "python -m workflow.scripts.check_gguf --config {input.settings:q} --model {input.model[0]:q}"
        " --converter {input.converter:q} --output {output:q} --log {log:q}"

# Before all long stages, and no input of the training, which it must not rerun.
rule check_gguf:
    input:
        model=lambda w: model_files(RUNS[w.run]),
        converter=lambda w: [] if RUNS[w.run].export.llama_cpp else layout.CONVERTERS,
    output:
        "results/runs/{run}/check_gguf/check.json",
    log:
        "logs/check_gguf/{run}.log",
    wildcard_constraints:
        run=any_of(EXPORTING["gguf"]),
    priority: FIRST + 2
    conda:
        "../../envs/gguf.yaml"
    params:
        model=lambda w: located(layout.model_dir(RUNS[w.run])),
        llama_cpp=lambda w, input: input.converter or RUNS[w.run].export.llama_cpp,
    shell:
        "python -m workflow.scripts.check_gguf --model {params.model:q}"
        " --llama-cpp {params.llama_cpp:q} --output {output:q} --log {log:q}"

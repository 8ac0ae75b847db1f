# A file per form and format, by the settings.
rule convert_gguf:
    input:
        unpack(
            lambda w: form_inputs(
                w.run, [form for form in TRAINED if FORMS[form].gguf in RUNS[w.run].export.gguf_of]
            )
        ),
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        weights="results/runs/{run}/consolidate/adapter/adapter_model.safetensors",
        tokens=lambda w: manifest(RUNS[w.run]),
        arrays=lambda w: layout.token_arrays(RUNS[w.run]),
        check="results/runs/{run}/check_gguf/check.json",
        converter=lambda w: [] if RUNS[w.run].export.llama_cpp else layout.CONVERTERS,
    output:
        directory("results/runs/{run}/convert_gguf"),
    log:
        "logs/convert_gguf/{run}.log",
    wildcard_constraints:
        run=any_of(EXPORTING["gguf"]),
    conda:
        "../../envs/gguf.yaml"
    threads: lambda w: cores(RUNS[w.run], most=1)
    params:
        config=lambda w: layout.stage_json("convert_gguf", RUNS[w.run]),
        adapter=subpath(input.weights, parent=True),
        tokens=subpath(input.tokens, parent=True),
        models=lambda w, input: form_options(RUNS[w.run], input),
        llama_cpp=lambda w, input: input.converter or RUNS[w.run].export.llama_cpp,
    shell:
        "python -m workflow.scripts.convert_gguf --config {params.config:q} --run {wildcards.run:q}"
        " {params.models:q} --adapter {params.adapter:q} --tokens {params.tokens:q}"
        " --llama-cpp {params.llama_cpp:q} --output {output:q} --log {log:q}"

# A file per form and format, by the settings.
rule convert_gguf:
    input:
        unpack(
            form_inputs(
                lambda run: [form for form in TRAINED if FORMS[form].gguf in run.export.gguf_of]
            )
        ),
        settings=settings("convert_gguf"),
        adapter=expand("results/runs/{{run}}/consolidate/adapter/{file}", file=ADAPTER_FILES),
        tokens=from_run(manifest),
        arrays=from_run(layout.token_arrays),
        check="results/runs/{run}/check_gguf/check.json",
        converter=only(lambda run: not run.export.llama_cpp, layout.CONVERTERS),
    output:
        directory("results/runs/{run}/convert_gguf"),
    log:
        "logs/convert_gguf/{run}.log",
    wildcard_constraints:
        run=any_of(EXPORTING["gguf"]),
    conda:
        "../../envs/gguf.yaml"
    threads: cores_of_one_gpu
    params:
        forms=form_options,
    shell:
        "python -m workflow.scripts.convert_gguf --config {input.settings:q} --run {wildcards.run:q}"
        " {params.forms:q} --adapter {input.adapter[0]:q}"
        " --tokens {input.tokens:q} --converter {input.converter:q} --output {output:q} --log {log:q}"

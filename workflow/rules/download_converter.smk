from workflow.lib.settings.evaluate import LLAMA_CPP_RELEASE, LLAMA_CPP_SHA256


rule download_converter:
    input:
        settings=settings(
            "download_converter",
            lambda _: {"release": LLAMA_CPP_RELEASE, "sha256": LLAMA_CPP_SHA256},
        ),
    output:
        directory(layout.CONVERTERS),
    log:
        "logs/download_converter/converter.log",
    priority: FIRST + 2
    conda:
        "../../envs/gguf.yaml"
    shell:
        "python -m workflow.scripts.download_converter --config {input.settings:q} --output {output:q} --log {log:q}"

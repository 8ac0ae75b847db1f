from workflow.lib.settings.evaluate import LLAMA_CPP_RELEASE, LLAMA_CPP_SHA256


rule download_converter:
    output:
        directory(layout.CONVERTERS),
    log:
        "logs/download_converter/converter.log",
    priority: FIRST + 2
    conda:
        "../../envs/gguf.yaml"
    params:
        config=json.dumps({"release": LLAMA_CPP_RELEASE, "sha256": LLAMA_CPP_SHA256}),
    shell:
        "python -m workflow.scripts.download_converter --config {params.config:q} --output {output:q} --log {log:q}"

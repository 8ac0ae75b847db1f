"""Whether vLLM and SGLang take an adapter, by the rules that they publish, and the commands that
serve it. Neither is run here.

Rules: vLLM `vllm/lora/peft_helper.py` and `vllm/config/lora.py`, SGLang
`python/sglang/srt/lora/lora_config.py`, read 2026-11-23; of experts vLLM's pull request 41384 and
SGLang's 25528.
"""

from collections.abc import Mapping
from typing import Any

from workflow.lib.report.card_inputs import CardInputs, code
from workflow.lib.system.number_formats import visible

# What vLLM's --max-lora-rank may be; its slots have that rank.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def obstacles(config: Mapping[str, Any]) -> list[str]:
    """Return why the servers would refuse an adapter or serve another one; config: PEFT's
    `adapter_config.json`.
    """
    found = []
    if config.get("use_dora"):
        found.append("it is DoRA, which vLLM refuses")
    if modules := config.get("modules_to_save"):
        names = ", ".join(str(name) for name in modules)
        found.append(f"it replaces whole modules ({names}), which vLLM refuses")
    for key, default in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        if any(value != default for value in (config.get(key) or {}).values()):
            found.append(f"{key} differs by module: vLLM reads one rank and one alpha")
    if config.get("target_parameters"):
        found.append(
            "it adapts experts (target_parameters), which vLLM and SGLang leave out without a word "
            "for several families"
        )
    if config.get("bias", "none") != "none":
        found.append("it has biases, which vLLM leaves out")
    if config["r"] > VLLM_RANKS[-1]:
        found.append(f"its rank {config['r']} is above {VLLM_RANKS[-1]}, the largest of vLLM")
    return found


def serving_section(inputs: CardInputs) -> str:
    """Return the commands for vLLM and SGLang, or why the adapter needs to be merged."""
    if inputs.measured.served.subject == "merged":
        lines = [
            "vllm serve path/to/merged",
            "python -m sglang.launch_server --model-path path/to/merged",
        ]
        return f"{_commands(lines)}{NOT_RUN}\n"
    if found := obstacles(inputs.adapter_config):
        reasons = "".join(f"- {code(reason)}\n" for reason in found)
        return (
            "By their published rules vLLM and SGLang cannot serve this adapter on its base:\n\n"
            f"{reasons}\nExport the merged model (<code>export.merged: true</code>) and serve "
            "that.\n"
        )
    rank = next(rank for rank in VLLM_RANKS if rank >= inputs.adapter_config["r"])
    base, name = visible(inputs.model_id or "path/to/base"), inputs.summary.run
    adapter = f"{name}=path/to/this/folder"
    lines = [
        f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {adapter}",
        f"python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {adapter}",
    ]
    measured = (
        "That form, tuned on original, is measured below."
        if "tuned_on_original" in inputs.measured.subjects
        else "That form, tuned on original, was not evaluated (`evaluate.served`)."
    )
    return f"{_commands(lines)}Both put the adapter on the base in 16 bits. {measured} {NOT_RUN}\n"


NOT_RUN = "The rules of vLLM and SGLang were checked; neither was run here."


def _commands(lines: list[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return f"```bash\n{text}```\n\n"

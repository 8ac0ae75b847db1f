"""The sections Use and Serving of a model card: the code that loads what was evaluated and will be
served, and the command of the server that was tried."""

from workflow.lib.artifacts.served_record import ServedCheck
from workflow.lib.model.architecture.model_files import ON_ORIGINAL
from workflow.lib.report.card_inputs import CardInputs, code, text
from workflow.lib.report.verdict import label
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECT_MEANINGS, SubjectName
from workflow.lib.system.number_formats import loss, signed, visible

NF4_FOLDER = "path/to/nf4/base"  # stands for the folder of a base that is nowhere else
FORMS: tuple[SubjectName, ...] = ("tuned", "tuned_on_original", "merged")


def use_section(inputs: CardInputs) -> str:
    measured, dtype = inputs.measured, inputs.parity.compute_dtype
    served = measured.served.subject
    remarks = [
        f"The verdict is about this: {label(measured.served)} ({SUBJECT_MEANINGS[served]}), "
        f"computed in {dtype}."
    ]
    if others := [SUBJECT_LABELS[name] for name in FORMS if name not in measured.subjects]:
        remarks.append(f"Not evaluated, and another model each: {', '.join(others)}.")
    if served == "merged":
        loading = _loading_merged(inputs.quantization.auto_class, dtype)
        return f"```python\n{loading}```\n\n{' '.join(remarks)}\n"
    remarks += _about_the_recovery(inputs) + _about_the_base(inputs, dtype=dtype)
    return f"```python\n{_loading(inputs, dtype=dtype)}```\n\n{' '.join(remarks)}\n"


def _about_the_recovery(inputs: CardInputs) -> list[str]:
    if inputs.on_original is None:
        return []
    return [
        "The adapter of this folder makes up for what 4 bits have lost, and belongs on the NF4 "
        f"base alone. The original in 16 bits takes that of the folder `{ON_ORIGINAL}`, which "
        f"holds the rest, at rank {inputs.on_original['r']}."
    ]


def needs_folder(card: str) -> bool:
    """Tell whether a card loads the base from a folder that only the machine of the run has."""
    return NF4_FOLDER in card


def _loading_merged(auto_class: str, dtype: str) -> str:
    return (
        f"import torch\nfrom transformers import {auto_class}, AutoTokenizer\n\n"
        'merged = "path/to/merged"\n'
        f"model = {auto_class}.from_pretrained(merged, dtype=torch.{dtype})\n"
        "tokenizer = AutoTokenizer.from_pretrained(merged)\n"
    )


def _is_made_anew(inputs: CardInputs) -> bool:
    """Tell whether Transformers makes the 4-bit base of the original when it loads it."""
    facts, in_4_bits = inputs.quantization, inputs.measured.served.subject == "tuned"
    is_other = facts.taken or facts.only_here is not None or inputs.nf4_base_id is not None
    return in_4_bits and not is_other


def _about_the_base(inputs: CardInputs, *, dtype: str) -> list[str]:
    base, reason = code(inputs.base_name), inputs.quantization.only_here
    in_4_bits = inputs.measured.served.subject == "tuned"
    remarks = []
    if in_4_bits and inputs.nf4_base_id is None and reason is not None:
        remarks.append(
            f"`{NF4_FOLDER}` is the folder that the workflow has made of {base}. Transformers "
            f"makes other 4-bit weights of it: {text(reason)}. Before you publish the adapter, "
            "upload a copy of the folder and name it (`export.nf4_base_id`)."
        )
    elif _is_made_anew(inputs) and dtype != "float32":
        remarks.append(f"The 4-bit weights are the same if the base is stored in {dtype}.")
    if inputs.model_id is None and inputs.nf4_base_id is None:
        remarks.append(
            f"`path/to/base` is the folder of {base}. `adapter_config.json` names the base by its "
            "path on the machine that exported the adapter. Set `export.base_id` to its hub id "
            "before you publish it."
        )
    return remarks


def _loading(inputs: CardInputs, *, dtype: str) -> str:
    facts, source, revision = inputs.quantization, inputs.model_id, inputs.revision
    in_4_bits = inputs.measured.served.subject == "tuned"
    is_made_anew = _is_made_anew(inputs)
    if in_4_bits and not is_made_anew and not facts.taken:
        source, revision = inputs.nf4_base_id or NF4_FOLDER, None
    options = [f"{visible(source or 'path/to/base')!r},"]
    if revision:
        options.append(f"revision={visible(revision)!r},")
    options.append(f"dtype=torch.{dtype},")
    if is_made_anew:
        skipped = [f"    llm_int8_skip_modules={facts.in_16_bits},"] if facts.in_16_bits else []
        options += [
            "quantization_config=BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            f"    bnb_4bit_use_double_quant={facts.settings['double_quant']},",
            f"    bnb_4bit_compute_dtype=torch.{dtype},",
            *skipped,
            "),",
        ]
    if in_4_bits and facts.quantized_stacks:
        return _loading_by_the_workflow(inputs, dtype=dtype)
    without_recovery = not in_4_bits and inputs.on_original is not None
    subfolder = f', subfolder="{ON_ORIGINAL}"' if without_recovery else ""
    lines = [
        "import torch",
        "from peft import PeftModel",
        "from transformers import (",
        f"    {facts.auto_class},",
        "    AutoTokenizer,",
        *(["    BitsAndBytesConfig,"] if is_made_anew else []),
        "    GenerationConfig,",
        ")",
        "",
        'adapter = "path/to/this/folder"',
        f"base = {facts.auto_class}.from_pretrained(",
        *(f"    {option}" for option in options),
        ")",
        f"model = PeftModel.from_pretrained(base, adapter{subfolder})",
        "tokenizer = AutoTokenizer.from_pretrained(adapter)",
        "model.generation_config = GenerationConfig.from_pretrained(adapter)",
    ]
    return "".join(f"{line}\n" for line in lines)


def _loading_by_the_workflow(inputs: CardInputs, *, dtype: str) -> str:
    """Return the code that loads experts in 4 bits, which Transformers itself does not."""
    folder = f"{NF4_FOLDER!r}"
    if inputs.nf4_base_id is not None:
        folder = f"snapshot_download({visible(inputs.nf4_base_id)!r})"
    lines = [
        "# Transformers itself loads no experts in 4 bits: run this in a checkout of the workflow.",
        "from pathlib import Path",
        "",
        "import torch",
        *(["from huggingface_hub import snapshot_download"] if inputs.nf4_base_id else []),
        "from transformers import AutoTokenizer, GenerationConfig",
        "",
        "from workflow.lib.export.stock_models import load_adapter, load_base",
        "from workflow.lib.model.backends import choose_device",
        "",
        'adapter = "path/to/this/folder"',
        "base = load_base(",
        f"    Path({folder}),",
        "    device=choose_device(),",
        f"    compute_dtype=torch.{dtype},",
        '    attention="eager",',
        ")",
        "model = load_adapter(base, Path(adapter))",
        "tokenizer = AutoTokenizer.from_pretrained(adapter)",
        "model.generation_config = GenerationConfig.from_pretrained(adapter)",
    ]
    return "".join(f"{line}\n" for line in lines)


def serving_section(inputs: CardInputs) -> str:
    if (checked := inputs.checked) is None:
        return "No server was tried (`export.serve`).\n"
    command = "vllm serve path/to/merged"
    if checked.max_lora_rank is not None:
        base, folder = visible(inputs.model_id or "path/to/base"), "path/to/this/folder"
        command = (
            f"vllm serve {base} --tokenizer {folder} --enable-lora "
            f"--max-lora-rank {checked.max_lora_rank} --lora-modules {inputs.summary.run}={folder}"
            + (f"/{ON_ORIGINAL}" if inputs.on_original else "")
        )
    shown = f"```bash\n{command}\n```\n\n"
    if checked.server.startswith("llama.cpp"):  # its commands are those of the files
        shown = ""
    return f"{shown}{served_sentence(checked)} Checked beside Transformers: {checked.told}.\n"


def served_sentence(checked: ServedCheck) -> str:
    cost = (
        ""
        if checked.cost is None
        else (f", {signed(checked.cost)} against the adapter on the NF4 base, as it was trained")
    )
    return (
        f"Served by {text(checked.server)} ({SUBJECT_LABELS[checked.subject]}, "
        f"{checked.compute_dtype}), its held-out loss is {loss(checked.loss)} nats per token{cost}."
    )

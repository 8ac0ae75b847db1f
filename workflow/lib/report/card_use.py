"""The section Use of a model card: the code that loads what was evaluated and will be served."""

from workflow.lib.report.card_inputs import CardInputs, code
from workflow.lib.report.verdict import label
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECT_MEANINGS, SubjectName
from workflow.lib.system.number_formats import visible

BLOCK_OF_BITSANDBYTES = (
    64  # weights per scale; `BitsAndBytesConfig` of Transformers 5.23 names no other
)
FORMS: tuple[SubjectName, ...] = ("tuned", "tuned_on_original", "merged")


def use_section(inputs: CardInputs) -> str:
    """Return how to load what was evaluated and is served, and what was not evaluated."""
    measured, dtype = inputs.measured, inputs.parity.compute_dtype
    served = measured.served.subject
    remarks = [
        f"The verdict is about this: {label(measured.served)} ({SUBJECT_MEANINGS[served]}), "
        f"computed in {dtype}.",
    ]
    if others := [SUBJECT_LABELS[name] for name in FORMS if name not in measured.subjects]:
        remarks.append(f"Not evaluated, and another model each: {', '.join(others)}.")
    if served == "merged":
        return f"```python\n{_loading_merged(dtype)}```\n\n{' '.join(remarks)}\n"
    remarks += _about_the_base(inputs, dtype=dtype)
    return f"```python\n{_loading(inputs, dtype=dtype)}```\n\n{' '.join(remarks)}\n"


def _loading_merged(dtype: str) -> str:
    """Return the code that loads the merged model, its tokenizer and generation settings."""
    return (
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'merged = "path/to/merged"\n'
        f"model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.{dtype})\n"
        "tokenizer = AutoTokenizer.from_pretrained(merged)\n"
    )


def _about_the_base(inputs: CardInputs, *, dtype: str) -> list[str]:
    """Return what a reader must know to put the right base under the adapter."""
    base, block = code(inputs.base_name), inputs.quantize.block_size
    in_4_bits = inputs.measured.served.subject == "tuned"
    remarks = []
    if in_4_bits and block != BLOCK_OF_BITSANDBYTES:
        remarks.append(
            f"`path/to/nf4/base` is the folder that the workflow has made of {base}: its blocks "
            f"hold {block} weights, "
            f"and Transformers itself quantizes in blocks of {BLOCK_OF_BITSANDBYTES}."
        )
    elif inputs.model_id is None:
        remarks.append(f"`path/to/base` is the folder of {base}.")
    if in_4_bits and block == BLOCK_OF_BITSANDBYTES and dtype != "float32":
        remarks.append(f"The 4-bit weights are the same if the base is stored in {dtype}.")
    if inputs.model_id is None:
        remarks.append(
            "`adapter_config.json` names the base by its path on the machine that exported the "
            "adapter. "
            "Set `export.base_id` to its hub id before you publish it."
        )
    return remarks


def _loading(inputs: CardInputs, *, dtype: str) -> str:
    """Return the code that loads model, tokenizer and generation settings."""
    in_4_bits = inputs.measured.served.subject == "tuned"
    is_made_anew = in_4_bits and inputs.quantize.block_size == BLOCK_OF_BITSANDBYTES
    source = inputs.model_id or "path/to/base"
    has_source = is_made_anew or not in_4_bits
    options = [f"{visible(source if has_source else 'path/to/nf4/base')!r},"]
    if has_source and inputs.revision:
        options.append(f"revision={visible(inputs.revision)!r},")
    options.append(f"dtype=torch.{dtype},")
    if is_made_anew:
        options += [
            "quantization_config=BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            f"    bnb_4bit_use_double_quant={inputs.quantize.double_quant},",
            f"    bnb_4bit_compute_dtype=torch.{dtype},",
            "),",
        ]
    lines = [
        "import torch",
        "from peft import PeftModel",
        "from transformers import (",
        "    AutoModelForCausalLM,",
        "    AutoTokenizer,",
        *(["    BitsAndBytesConfig,"] if is_made_anew else []),
        "    GenerationConfig,",
        ")",
        "",
        'adapter = "path/to/this/folder"',
        "base = AutoModelForCausalLM.from_pretrained(",
        *(f"    {option}" for option in options),
        ")",
        "model = PeftModel.from_pretrained(base, adapter)",
        "tokenizer = AutoTokenizer.from_pretrained(adapter)",
        "model.generation_config = GenerationConfig.from_pretrained(adapter)",
    ]
    return "".join(f"{line}\n" for line in lines)

"""The exported files, loaded as any user would: stock Transformers and PEFT, on one process.

What is measured and compared after training goes through here and never through the training code, so
an export that only our own code could read would show. Two things are added to the stock calls. They
refuse what Transformers and PEFT only warn about (tensors missing, left over, or of another shape).
And they mend two traps:

* Transformers 5.23 leaves every tensor of a pre-quantized bitsandbytes checkpoint in the type of the
  file, whatever `dtype` asks for: the deserializer's pattern `weight` matches norms and embeddings too
  (`HfQuantizer.get_new_dtype`). They are cast here.
* bitsandbytes 0.50 repacks a `Linear4bit` weight in place in its first evaluation forward on a CPU with
  AVX512-BF16; later gradients through it are silently lost, and the results shift by about 1e-2.

Nothing here runs remote code or needs a network.
"""

from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from workflow.lib.artifacts import read_json
from workflow.lib.errors import UserError, setting_error
from workflow.lib.gpus import automatic_dtype, dtype_lack
from workflow.lib.weights import check_whole, open_whole

ADAPTER_WEIGHTS = "adapter_model.safetensors"
FLASH_AVAILABLE = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}


def choose_device() -> torch.device:
    """Return `cuda` (all visible GPUs, filled in order) where there is one, else `cpu`."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that `model.compute_dtype` means: `auto` is bfloat16 on GPUs that have it, else float16, and float32 on CPUs.

    Raises `UserError` for float16 on a CPU, or bfloat16 on a GPU without it.
    """
    cuda = device.type == "cuda"
    wanted = automatic_dtype(cuda=cuda, bfloat16=has_bfloat16(device)) if name == "auto" else name
    if lack := dtype_lack(wanted, cuda=cuda, bfloat16=has_bfloat16(device)):
        raise setting_error("model.compute_dtype", wanted, lack, "Set it to auto")
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 itself: compute capability 8.0 (PyTorch emulates it on older ones). Assumed of one that is not there."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_attention(
    name: str,
    device: torch.device,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    softcapped: bool = False,
) -> str:
    """Return the attention implementation that `model.attention` means for a stock model.

    `auto` (and `varlen`, which is for training) is flash_attention_2 where a GPU, the package and a 16-bit
    `compute_dtype` are there, else sdpa; a model with soft-capped scores gets eager instead of sdpa. Raises `UserError` if an implementation asked for by name cannot run.
    """
    automatic = name in ("auto", "varlen")
    lack = _flash_lack("flash_attention_2" if automatic else name, device, compute_dtype)
    if automatic:
        if lack is None:
            return "flash_attention_2"
        return "eager" if softcapped else "sdpa"
    if name == "sdpa" and softcapped:
        lack = "it ignores the soft-capping of attention scores that this model has"
    if lack is not None:
        raise setting_error("model.attention", name, lack, "Set it to auto or eager")
    return name


def _flash_lack(name: str, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """What a flash attention implementation lacks here; None for nothing, or for another implementation."""
    if name not in FLASH_AVAILABLE:
        return None
    if device.type != "cuda":
        return f"it needs a GPU, and this runs on {device.type}"
    if compute_dtype == torch.float32:
        return "it computes in 16 bits, and compute_dtype is float32"
    if not has_bfloat16(device):
        return "it needs a GPU of compute capability 8.0 or more"
    return None if FLASH_AVAILABLE[name]() else "its package is not installed"


def softcaps_attention(folder: Path) -> bool:
    """Tell whether the model in `folder` soft-caps its attention scores (Gemma 2), which sdpa would ignore."""
    return read_json(folder / "config.json").get("attn_logit_softcapping") is not None


def attention_dropout(folder: Path) -> float:
    """Return the share of attention weights that the model in `folder` drops in training."""
    return float(read_json(folder / "config.json").get("attention_dropout") or 0.0)


def load_base(
    base_dir: Path, *, device: torch.device, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Load an NF4 checkpoint folder in evaluation mode, its 4-bit linears computing in `compute_dtype`.

    `cuda` without an index fills the visible GPUs one after the other, so a model larger than one GPU
    still loads; an index pins it to that one. Raises `UserError` if the folder does not hold
    every tensor of the model in its shape, or if the GPUs cannot hold it.
    """
    if not (base_dir / "config.json").is_file():
        raise UserError(f"{base_dir} holds no model (config.json is not there).")
    check_whole(base_dir)
    model, report = _from_pretrained(
        base_dir,
        device_map="sequential" if device == torch.device("cuda") else {"": device},
        dtype=compute_dtype,
        attn_implementation=attention,
    )
    refuse_unmatched(
        base_dir,
        missing=report["missing_keys"],
        unexpected=report["unexpected_keys"],
        mismatched=[key for key, *_ in report["mismatched_keys"]],
    )
    _cast_unquantized_(model, compute_dtype)
    _set_up_linears_(model, compute_dtype)
    return model


def _from_pretrained(base_dir: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(base_dir),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except ValueError as error:
        if "dispatched on the CPU or the disk" not in str(error):
            raise
        raise UserError(
            f"The visible GPUs cannot hold {base_dir}: part of it would go to the CPU, where 4-bit layers of "
            "a GPU model cannot run. Free GPU memory, or show the process more GPUs."
        ) from error
    model, report = loaded
    return model, report


def _cast_unquantized_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what is not quantized (embeddings, norms, head, biases); see the module's first trap.

    What the architecture insists on keeping in float32 stays, and so do buffers (rotary frequencies).
    """
    kept = set(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        quantized = isinstance(parameter, Params4bit)
        if parameter.is_floating_point() and not quantized and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _set_up_linears_(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = compute_dtype
            module.compute_type_is_set = True
            # Else a bf16 checkpoint's weights are rounded to bf16 even where the products are in fp32.
            assert isinstance(module.weight, Params4bit)
            module.weight.quant_state.dtype = compute_dtype
            if module.weight.device.type == "cpu":
                module.support_avx512bf16_for_cpu = False  # the module's second trap


def load_adapter(model: PreTrainedModel, adapter_dir: Path) -> PeftModel:
    """Put the exported adapter on `model` (changed in place) for inference.

    Raises `UserError` if files are missing, or if a tensor of the adapter has no place in the model, a
    place has no tensor, or their shapes differ: stock PEFT only warns, or says nothing.
    """
    for name in ("adapter_config.json", ADAPTER_WEIGHTS):
        if not (adapter_dir / name).is_file():
            raise UserError(f"{adapter_dir} holds no exported adapter ({name} is not there).")
    open_whole(adapter_dir / ADAPTER_WEIGHTS, made_here=True)
    try:
        tuned: PeftModel = PeftModel.from_pretrained(
            model, str(adapter_dir), is_trainable=False, torch_device=model.device.type
        )
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{adapter_dir} does not fit the base model: {reason}") from error
    places = set(get_peft_model_state_dict(tuned, save_embedding_layers=False))
    with safe_open(adapter_dir / ADAPTER_WEIGHTS, framework="pt") as file:
        stored = set(file.keys())
    refuse_unmatched(adapter_dir, missing=places - stored, unexpected=stored - places)
    return tuned


def refuse_unmatched(
    folder: Path,
    *,
    missing: set[str],
    unexpected: set[str],
    mismatched: list[str] | tuple[str, ...] = (),
) -> None:
    """Raise `UserError` naming the tensors of `folder` that the model lacks, has no file for, or has in another shape."""
    found = {"missing": missing, "left over": unexpected, "of another shape": mismatched}
    wrong = [f"{len(names)} {kind} ({min(names)})" for kind, names in found.items() if names]
    if wrong:
        raise UserError(
            f"{folder} does not fit the model: of its tensors, {'; '.join(wrong)}. "
            "The folder is incomplete or belongs to another model: make it again."
        )

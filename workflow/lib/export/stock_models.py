"""The exported files, loaded as any user would: stock Transformers and PEFT, on one process.

All measurements after training load models here and never through the training code, so an export
that only our own code could read would show. Two things are added to the stock calls. They refuse
cases that Transformers and PEFT only warn about (tensors missing, left over, or of another shape).
And they fix five traps:

* Transformers 5.23 leaves every tensor of a pre-quantized bitsandbytes checkpoint in the file's
  dtype, whatever `dtype` is: the deserializer's pattern `weight` matches norms and embeddings too
  (`HfQuantizer.get_new_dtype`). They are cast here.
* bitsandbytes 0.50 repacks a `Linear4bit` weight in place in its first evaluation forward on a CPU
  with AVX512-BF16; later gradients through it are silently lost, and the results shift by about
  1e-2.
* bitsandbytes 0.50 decodes rows wrongly on a CPU if they are not whole blocks
  (`frozen_linear.decoded`). Such weights are decoded here once, and multiplied by a plain linear.
* Dynamic NTK scaling of Transformers 5.23 rotates a row by the frequencies of an earlier longer one
  (`by_length`).
* PEFT 0.21's wrappers of tied tables with trained rows cannot be tied again, which lm-eval 0.4 does
  with any model.

Nothing here runs remote code or needs a network."""

import copy
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import ExpertStack
from workflow.lib.checkpoints.files.quantization_settings import METHOD
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.checkpoints.safetensors_reader import check_whole
from workflow.lib.export.packed_stacks import linear_names, pack_, with_linears
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.model.backends import resolve_attention, resolve_dtype
from workflow.lib.model.layers.rotary_by_length import rotate_by_call_alone_
from workflow.lib.model.layers.weight_storage import STATE_SUFFIX
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.undocumented_interfaces import MODEL_PACKAGES, check_interfaces

DECODED = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def load_options(
    base: Checkpoint, *, device: torch.device, settings: ModelConfig
) -> dict[str, Any]:
    """Return the options of models on `device`: arguments of `stock_models.load_base`."""
    dtype = resolve_dtype(settings.compute_dtype, device)
    attention = resolve_attention(
        settings.attention, device, base.attention_needs, compute_dtype=dtype
    )
    return {"device": device, "compute_dtype": dtype, "attention": attention}


def load_base(
    checkpoint: Checkpoint, *, device: torch.device, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Load a checkpoint in evaluation mode, computing in `compute_dtype`. `cuda` without an
    index fills visible GPUs one after the other. Raises `UserError` if tensors are missing or have
    another shape, or GPUs cannot hold it."""
    folder = checkpoint.folder
    if not checkpoint.config_path.is_file():
        raise UserError(
            f"{folder} holds no model (config.json is not there). Name the folder of a model; if "
            "a stage makes it, delete it and repeat the command."
        )
    check_interfaces(*MODEL_PACKAGES)
    check_whole(folder)
    stock = checkpoint.build(compute_dtype)
    stacks = _packed_stacks(checkpoint)
    decoding = _decoding(stock, checkpoint)
    plain = type(stock) if "state_dict" in decoding else auto_class(stock.config)
    model, report = _from_pretrained(
        with_linears(type(stock), stacks) if stacks else plain,
        folder,
        device_map="sequential" if device == torch.device("cuda") else {"": device},
        dtype=compute_dtype,
        attn_implementation=attention,
        key_mapping=linear_names(stacks) or None,
        **decoding,
    )
    refuse_unmatched(
        folder,
        missing=report["missing_keys"],
        # An original may have more, which `describe_model` logs and a merged model keeps.
        unexpected=report["unexpected_keys"] if checkpoint.is_nf4 else set(),
        mismatched=[key for key, *_ in report["mismatched_keys"]],
    )
    _cast_unquantized_(model, compute_dtype)
    _set_up_linears_(model, compute_dtype)
    pack_(model, stacks, linears=checkpoint.names.expert_projections if stacks else ())
    decode_partial_rows_(model)
    rotate_by_call_alone_(model)
    return model


def load_stock(
    checkpoint: Checkpoint, *, device: torch.device, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Load a model as a user does: stock Transformers, packed weights by their format's package."""
    model, _ = _from_pretrained(
        auto_class(checkpoint.build(compute_dtype).config),
        checkpoint.folder,
        device_map="sequential" if device == torch.device("cuda") else {"": device},
        dtype=compute_dtype,
        attn_implementation=attention,
    )
    _cast_unquantized_(model, compute_dtype)  # decoded experts are in bf16
    return model


def _decoding(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return how an original is loaded: with its configuration of the training, packed weights
    decoded as for the training (its own kernels compute otherwise)."""
    if not checkpoint.is_packed or checkpoint.is_nf4:
        return {"config": model.config}
    method = checkpoint.stated_quantization.get(METHOD)
    if method in DECODED:
        decoded_by = DECODED[method](dequantize=True)
        return {"config": model.config, "quantization_config": decoded_by}
    # Transformers decodes these by packages that need a GPU, or keeps them packed.
    with checkpoint.decoded() as reader:
        tensors = {name: reader.tensor(name) for name in reader.names()}
    config = copy.deepcopy(model.config)
    del config.quantization_config
    return {"config": config, "state_dict": tensors}


def _packed_stacks(checkpoint: Checkpoint) -> dict[str, ExpertStack]:
    """Return the stacks of experts that a folder has in NF4."""
    if not checkpoint.is_nf4:
        return {}
    with checkpoint.stored() as reader:
        stacks = checkpoint.stacks.items()
        return {path: stack for path, stack in stacks if f"{path}.{STATE_SUFFIX}" in reader}


def _from_pretrained(
    model_class: Any, base_dir: Path, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        loaded: Any = model_class.from_pretrained(
            None if "state_dict" in options else str(base_dir),
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
            f"The visible GPUs cannot hold {base_dir}: part of it would go to the CPU, where 4-bit "
            "layers of a GPU model cannot run. Free GPU memory, or show the process more GPUs."
        ) from error
    model, report = loaded
    return model, report


def _cast_unquantized_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast unquantized tensors (first trap); the architecture's float32 and buffers stay."""
    fp32_modules = set(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and not isinstance(parameter, Params4bit)
        if plain and fp32_modules.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _set_up_linears_(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = compute_dtype
            module.compute_type_is_set = True
            # Else a bf16 checkpoint's weights are rounded to bf16 even if the matmuls are in
            # fp32.
            assert isinstance(module.weight, Params4bit)
            module.weight.quant_state.dtype = compute_dtype
            if module.weight.device.type == "cpu":
                module.support_avx512bf16_for_cpu = False  # the module's second trap


def decode_partial_rows_(model: nn.Module) -> None:
    """Replace 4-bit linears on the CPU by plain ones if rows are not whole blocks (third trap)."""
    for path, linear in packed_linears(model).items():
        on_cpu = linear.weight.device.type == "cpu"
        if on_cpu and linear.in_features % linear.weight.quant_state.blocksize:
            decode_linear_(model, path)


def packed_linears(model: nn.Module) -> dict[str, Any]:
    """Return the 4-bit linears of a model, by path."""
    return {path: x for path, x in model.named_modules() if isinstance(x, Linear4bit)}


@torch.no_grad()
def decode_linear_(model: nn.Module, path: str) -> None:
    """Replace a 4-bit linear by a plain one with the values that it decodes to at each call."""
    linear: Any = model.get_submodule(path)
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    values = decoded(linear.weight.data, linear.weight.quant_state)
    plain.weight = nn.Parameter(values, requires_grad=False)
    plain.bias = linear.bias
    model.set_submodule(path, plain.train(linear.training))


def load_adapter(model: PreTrainedModel, adapter: Adapter) -> PeftModel:
    """Put the exported adapter on `model`, in place. Raises `UserError` if files are missing, or
    tensors and places do not correspond, which stock PEFT only warns of."""
    adapter.check_exported()
    folder = adapter.folder
    try:
        tuned: PeftModel = PeftModel.from_pretrained(
            model, str(folder), is_trainable=False, torch_device=model.device.type
        )
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder} does not fit the base model: {reason}. Name the adapter of this base, "
            "or export it again."
        ) from error
    expected = set(get_peft_model_state_dict(tuned, save_embedding_layers=False))
    with adapter.reader() as reader:
        stored = {*reader.names()}
    refuse_unmatched(folder, missing=expected - stored, unexpected=stored - expected)
    config: Any = tuned.peft_config["default"]
    if config.trainable_token_indices:
        inner: Any = tuned.get_base_model()
        inner.tie_weights = lambda *_, **__: None  # fifth trap; they are tied
    return tuned


def refuse_unmatched(
    folder: Path,
    *,
    missing: set[str],
    unexpected: set[str],
    mismatched: list[str] | tuple[str, ...] = (),
) -> None:
    """Raise `UserError` naming tensors that model and `folder` do not both have, in one shape."""
    defects = {"missing": missing, "left over": unexpected, "of another shape": mismatched}
    wrong = [f"{len(names)} {kind} ({min(names)})" for kind, names in defects.items() if names]
    if wrong:
        raise UserError(
            f"{folder} does not fit the model: of its tensors, {'; '.join(wrong)}. "
            "The folder is incomplete or belongs to another model: make it again."
        )

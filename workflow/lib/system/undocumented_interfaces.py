"""Undocumented names of packages that this workflow uses, checked before work begins.

A release without one of them would fail late, by an AttributeError, or not at all: an attribute
that nobody reads any more can still be set. Only torch's flight recorder (`heartbeat`) has no
check, since there is another way without it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from workflow.lib.system.errors import UserError


@dataclass(frozen=True)
class Interface:
    """`name` of what `owner` returns, which is called `owner_name` in messages."""

    package: str
    owner_name: str
    name: str
    owner: Callable[[], Any]


def _of(package: str, module: str, path: str, *names: str) -> tuple[Interface, ...]:
    """Names of a module (empty path), or of a class or object of it."""
    owner_name = f"{module}.{path}".rstrip(".")

    def owner() -> Any:
        imported: Any = import_module(module)
        return attrgetter(path)(imported) if path else imported

    return tuple(Interface(package, owner_name, name, owner) for name in names)


def _of_instance(
    package: str, module: str, path: str, *names: str, **arguments: Any
) -> tuple[Interface, ...]:
    """Attributes that a class gives its instances."""

    def owner() -> Any:
        return getattr(import_module(module), path)(**arguments)

    return tuple(Interface(package, f"{module}.{path}", name, owner) for name in names)


FSDP2 = "torch.distributed.fsdp._fully_shard"

INTERFACES = (
    # float16: gradients divided by the loss scale; gradients that stay for CUDA graphs, zeroed
    *_of("torch", "torch", "", "_foreach_mul_", "_foreach_zero_"),
    *_of("torch", "torch", "", "_scaled_mm"),  # matmuls in float8 with a scale per row
    # where a process's part of a tensor begins
    *_of("torch", "torch.distributed.tensor", "DTensor", "__create_chunk_list__"),
    # which saved tensors are views of parameters, and which have changed since
    *_of("torch", "torch", "Tensor", "_base", "_version"),
    *_of("torch", "torch", "Tensor", "_make_wrapper_subclass"),  # NF4 experts of stock models
    *_of("torch", "torch", "UntypedStorage", "_cdata"),  # whether two tensors share memory
    *_of("torch", "torch", "_C", "_current_graph_task_id"),  # whether a matmul is in backward
    # a failed capture leaves the allocator as if it went on
    *_of("torch", "torch", "_C", "_cuda_endAllocateToPool", "_cuda_releasePool"),
    # a micro-batch that broke off within a capture is forgotten
    *_of("torch", "torch.distributed.fsdp", "FSDPModule", "_get_fsdp_state"),
    *_of("torch", f"{FSDP2}._fsdp_common", "TrainingState", "IDLE"),
    *_of("torch", f"{FSDP2}._fsdp_param_group", "FSDPParamGroup", "_to_sharded"),
    *_of_instance(
        "torch", f"{FSDP2}._fsdp_state", "FSDPState", "_comm_ctx", "_state_ctx", "_fsdp_param_group"
    ),
    # a module's tensors without a search by attribute, and buffers that no checkpoint holds
    *_of_instance("torch", "torch.nn", "Module", "_modules", "_parameters", "_buffers"),
    *_of_instance("torch", "torch.nn", "Module", "_non_persistent_buffers_set"),
    # the state of a stored weight; moments made before the first step
    *_of("bitsandbytes", "bitsandbytes.functional", "QuantState", "from_dict"),
    *_of("bitsandbytes", "bitsandbytes.optim.adamw", "AdamW", "init_state"),
    *_of_instance(  # the compute dtype of stock linears; no repacking on CPUs
        "bitsandbytes",
        "bitsandbytes.nn",
        "Linear4bit",
        "compute_type_is_set",
        "support_avx512bf16_for_cpu",
        input_features=2,
        output_features=2,
        device="meta",
    ),
    # buffers that the family computes; modules that stay in 16 or 32 bits; the layers' class
    *_of("transformers", "transformers", "PreTrainedModel", "_init_weights"),
    *_of("transformers", "transformers", "PreTrainedModel", "_keep_in_fp32_modules"),
    *_of("transformers", "transformers", "PreTrainedModel", "_keep_in_fp32_modules_strict"),
    *_of("transformers", "transformers", "PreTrainedModel", "_no_split_modules"),
    # a model's attention, and the experts of a layer that is described
    *_of_instance("transformers", "transformers", "PreTrainedConfig", "_attn_implementation"),
    *_of_instance("transformers", "transformers", "PreTrainedConfig", "_experts_implementation"),
    *_of("transformers", "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", "get_interface"),
    # the files that Transformers loads from a folder, and a module's name for a stored tensor
    *_of("transformers", "transformers.modeling_utils", "", "_get_resolved_checkpoint_files"),
    *_of("transformers", "transformers.conversion_mapping", "", "get_model_conversion_mapping"),
    *_of("transformers", "transformers.core_model_loading", "", "rename_source_key"),
    *_of(  # what experts compute between their matmuls
        "transformers",
        "transformers.models.mixtral.modeling_mixtral",
        "MixtralExperts",
        "_apply_gate",
    ),
    *_of("peft", "peft", "LoraConfig", "_register_custom_module"),  # PEFT's layer for our linear
    # linears that get no adapter, and so stay in 16 bits
    *_of("peft", "peft.tuners.tuners_utils", "", "_check_lora_target_modules_mamba"),
    *_of("lm_eval", "lm_eval.utils", "", "env"),  # task templates in a sandbox
    *_of(  # requests shared by processes, and counted
        "lm_eval",
        "lm_eval.models.huggingface",
        "HFLM",
        "_loglikelihood_tokens",
        "_model_call",
        "_model_generate",
    ),
)
# Recordings of the engine (`workflow.lib.recording`): tensors without values, what operations make
# of them, a device and processes that are not there, what kernels allocate by operator.
OF_RECORDINGS = (
    *_of("torch", "torch._subclasses.fake_tensor", "", "FakeTensor", "FakeTensorMode"),
    *_of("torch", "torch._subclasses.fake_tensor", "", "in_kernel_invocation_manager"),
    *_of("torch", "torch", "Tensor", "_make_subclass"),
    *_of("torch", "torch", "_C", "_get_dispatch_mode", "_set_throw_on_mutable_data_ptr"),
    *_of("torch", "torch", "_C._TorchDispatchModeKey", "FAKE"),
    *_of("torch", "torch.utils._python_dispatch", "", "TorchDispatchMode"),
    *_of("torch", "torch.utils._pytree", "", "tree_iter"),
    *_of(
        "torch", "torch.utils.backend_registration", "", "_setup_privateuseone_for_python_backend"
    ),
    *_of("torch", "torch.testing._internal.distributed.fake_pg", "", "FakeStore"),
    *_of("torch", "torch.autograd", "Variable", "_execution_engine"),  # the end of backward
    *_of(
        "torch",
        "torch",
        "ops.aten",
        "_grouped_mm",
        "_local_scalar_dense",
        "_softmax_backward_data",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_unsafe_view",
        "_to_copy",
        "_foreach_copy_",
    ),
    *_of("torch", "torch", "ops.aten.mm.default", "_schema"),
    *_of("torch", "torch", "ops.torch_attn", "_varlen_attn_backward"),
)
OF_MODELS = ("torch", "bitsandbytes", "transformers", "peft")


def check_interfaces(*packages: str) -> None:
    """Raise `UserError` if an installed release of these packages lacks a name that is used."""
    _check([used for used in INTERFACES if used.package in packages])


def check_recordings() -> None:
    """Raise `UserError` if torch lacks a name that recordings use."""
    import_module("torch.nn.attention.varlen")  # which registers its operators
    _check(OF_RECORDINGS)


def _check(interfaces: Iterable[Interface]) -> None:
    for used in interfaces:
        if not _there(used):
            raise UserError(
                f"{used.package} {version(used.package)} has no {used.owner_name}.{used.name}, "
                "which this workflow uses. Install the release that envs/pins.txt names."
            )


def _there(used: Interface) -> bool:
    try:
        return hasattr(used.owner(), used.name)
    except (ImportError, AttributeError, TypeError):  # the owner is gone, or is made otherwise
        return False

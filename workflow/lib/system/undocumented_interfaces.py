"""Undocumented names of packages that this workflow uses, checked before work begins.

A release without one of them would fail late, by an AttributeError, or not at all: an attribute
that nobody reads any more can still be set. `docs/decisions.md` says what each is used for.
"""

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
    *_of("torch", "torch", "", "_foreach_mul_", "_foreach_zero_", "_scaled_mm"),
    *_of("torch", "torch.distributed.tensor", "DTensor", "__create_chunk_list__"),
    *_of("torch", "torch", "Tensor", "_base", "_make_wrapper_subclass", "_version"),
    *_of("torch", "torch", "UntypedStorage", "_cdata"),
    *_of("torch", "torch", "_C", "_current_graph_task_id", "_cuda_endAllocateToPool"),
    *_of("torch", "torch", "_C", "_cuda_releasePool"),
    *_of("torch", "torch.distributed.fsdp", "FSDPModule", "_get_fsdp_state"),
    *_of("torch", f"{FSDP2}._fsdp_common", "TrainingState", "IDLE"),
    *_of("torch", f"{FSDP2}._fsdp_param_group", "FSDPParamGroup", "_to_sharded"),
    *_of_instance(
        "torch", f"{FSDP2}._fsdp_state", "FSDPState", "_comm_ctx", "_state_ctx", "_fsdp_param_group"
    ),
    *_of_instance(
        "torch",
        "torch.nn",
        "Module",
        "_modules",
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
    ),
    *_of("bitsandbytes", "bitsandbytes.functional", "QuantState", "from_dict"),
    *_of("bitsandbytes", "bitsandbytes.optim.adamw", "AdamW", "init_state"),
    *_of_instance(
        "bitsandbytes",
        "bitsandbytes.nn",
        "Linear4bit",
        "compute_type_is_set",
        "support_avx512bf16_for_cpu",
        input_features=2,
        output_features=2,
        device="meta",
    ),
    *_of(
        "transformers",
        "transformers",
        "PreTrainedModel",
        "_init_weights",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_no_split_modules",
    ),
    *_of_instance(
        "transformers",
        "transformers",
        "PreTrainedConfig",
        "_attn_implementation",
        "_experts_implementation",
    ),
    *_of("transformers", "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", "get_interface"),
    *_of("transformers", "transformers.modeling_utils", "", "_get_resolved_checkpoint_files"),
    *_of(
        "transformers",
        "transformers.conversion_mapping",
        "",
        "get_model_conversion_mapping",
    ),
    *_of("transformers", "transformers.core_model_loading", "", "rename_source_key"),
    *_of(
        "transformers",
        "transformers.models.mixtral.modeling_mixtral",
        "MixtralExperts",
        "_apply_gate",
    ),
    *_of("peft", "peft", "LoraConfig", "_register_custom_module"),
    *_of("peft", "peft.tuners.tuners_utils", "", "_check_lora_target_modules_mamba"),
    *_of("lm_eval", "lm_eval.utils", "", "env"),
    *_of(
        "lm_eval",
        "lm_eval.models.huggingface",
        "HFLM",
        "_loglikelihood_tokens",
        "_model_call",
        "_model_generate",
    ),
)
# What recordings of the engine need (`workflow.lib.recording`), and nothing else does.
OF_RECORDINGS = (
    *_of("torch", "torch._subclasses.fake_tensor", "", "FakeTensor", "FakeTensorMode"),
    *_of("torch", "torch._subclasses.fake_tensor", "", "in_kernel_invocation_manager"),
    *_of("torch", "torch", "Tensor", "_make_subclass"),
    *_of("torch", "torch", "_C", "_get_dispatch_mode", "_set_throw_on_mutable_data_ptr"),
    *_of("torch", "torch", "_C._TorchDispatchModeKey", "FAKE"),
    *_of("torch", "torch.utils._python_dispatch", "", "TorchDispatchMode"),
    *_of("torch", "torch.utils._pytree", "", "tree_iter"),
    *_of(
        "torch",
        "torch.utils.backend_registration",
        "",
        "_setup_privateuseone_for_python_backend",
    ),
    *_of("torch", "torch.testing._internal.distributed.fake_pg", "", "FakeStore"),
    *_of("torch", "torch.autograd", "Variable", "_execution_engine"),
    *_of(
        "torch",
        "torch",
        "ops.aten",
        "_local_scalar_dense",
        "_softmax_backward_data",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ),
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

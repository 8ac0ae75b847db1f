"""Undocumented names of packages that this workflow uses, checked before work begins.

Without one of them a release would fail late, by an AttributeError, or not at all: an attribute
that nobody reads any more can still be set. Only torch's flight recorder (`heartbeat`) has no
check, since there is another way without it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from workflow.lib.system.environment import shipped_path
from workflow.lib.system.errors import UserError

# Arguments of classes whose instances are checked.
ARGUMENTS = {"Linear4bit()": {"input_features": 2, "output_features": 2, "device": "meta"}}


@dataclass(frozen=True)
class Interface:
    """`name` of an owner: a module, `module:object`, or of instances `module:Class()`."""

    owner: str
    name: str

    @property
    def package(self) -> str:
        return re.split("[.:]", self.owner)[0]

    def is_there(self) -> bool:
        """Tell whether the installed release has the name."""
        module, _, path = self.owner.partition(":")
        try:
            value: Any = import_module(module)
            if path:
                value = attrgetter(path.removesuffix("()"))(value)
            if path.endswith("()"):
                value = value(**ARGUMENTS.get(path, {}))
            return hasattr(value, self.name)
        except (ImportError, AttributeError, TypeError):  # no owner, or other arguments
            return False


def _interfaces(names: Mapping[str, str]) -> tuple[Interface, ...]:
    return tuple(Interface(owner, name) for owner, words in names.items() for name in words.split())


FSDP2 = "torch.distributed.fsdp._fully_shard"
INTERFACES = _interfaces(
    {
        # float16: gradients divided by the loss scale; gradients that stay for CUDA graphs, zeroed;
        # matmuls in float8 with a scale per row
        "torch": "_foreach_mul_ _foreach_zero_ _scaled_mm",
        # attention whose backward takes some heads at a time
        "torch.nn.attention.varlen": "_varlen_attn _varlen_attn_backward",
        "torch:ops.aten": (
            "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
        ),
        # where a process's part of a tensor begins
        "torch.distributed.tensor:DTensor": "__create_chunk_list__",
        # which saved tensors are views of parameters, and which have changed; NF4 experts of stock
        # models
        "torch:Tensor": "_base _version _make_wrapper_subclass",
        "torch:UntypedStorage": "_cdata",  # whether two tensors share memory
        # whether a matmul is in backward; a failed capture leaves the allocator as if it went on
        "torch:_C": "_current_graph_task_id _cuda_endAllocateToPool _cuda_releasePool",
        # a micro-batch that broke off within a capture is forgotten
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
        f"{FSDP2}._fsdp_common:TrainingState": "IDLE",
        f"{FSDP2}._fsdp_param_group:FSDPParamGroup": "_to_sharded",
        f"{FSDP2}._fsdp_state:FSDPState()": "_comm_ctx _state_ctx _fsdp_param_group",
        # a module's tensors without attribute access, and buffers that no checkpoint holds
        "torch.nn:Module()": "_modules _parameters _buffers _non_persistent_buffers_set",
        # the state of a stored weight; moments made before the first step
        "bitsandbytes.functional:QuantState": "from_dict",
        "bitsandbytes.optim.adamw:AdamW": "init_state",
        # the compute dtype of stock linears; no repacking on CPUs
        "bitsandbytes.nn:Linear4bit()": "compute_type_is_set support_avx512bf16_for_cpu",
        # buffers that the family computes; modules that stay in 16 or 32 bits; the layers' class;
        # whether a token may be a CUDA graph
        "transformers:PreTrainedModel": (
            "_init_weights _keep_in_fp32_modules _keep_in_fp32_modules_strict _no_split_modules "
            "_can_compile_fullgraph"
        ),
        # a model's attention, and the experts of a layer that is described
        "transformers:PreTrainedConfig()": "_attn_implementation _experts_implementation",
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS": "get_interface",
        # the files that Transformers loads from a folder, and a module's name for a stored tensor
        "transformers.modeling_utils": "_get_resolved_checkpoint_files",
        "transformers.conversion_mapping": "get_model_conversion_mapping",
        "transformers.core_model_loading": "rename_source_key",
        # the experts' gate between their matmuls
        "transformers.models.mixtral.modeling_mixtral:MixtralExperts": "_apply_gate",
        "peft:LoraConfig": "_register_custom_module",  # PEFT's layer for our linear
        # linears that get no adapter, and so stay in 16 bits
        "peft.tuners.tuners_utils": "_check_lora_target_modules_mamba",
        "lm_eval.tasks._yaml_loader": "load_yaml",  # a task whose data lie beside its file
        "lm_eval.utils": "env",  # task templates in a sandbox
        # requests shared by processes, and counted
        "lm_eval.models.huggingface:HFLM": "_loglikelihood_tokens _model_call _model_generate",
    }
)
# Recordings of the engine (`workflow.lib.recording`): tensors without values, results of operations
# on them, a simulated device and processes, allocations of kernels by operator.
RECORDING_INTERFACES = _interfaces(
    {
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode in_kernel_invocation_manager",
        "torch:Tensor": "_make_subclass",
        "torch:_C": "_get_dispatch_mode _set_throw_on_mutable_data_ptr",
        "torch:_C._TorchDispatchModeKey": "FAKE",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "tree_iter",
        "torch.utils.backend_registration": "_setup_privateuseone_for_python_backend",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.autograd:Variable": "_execution_engine",  # the end of backward
        "torch:ops.aten": (
            "_grouped_mm _local_scalar_dense _softmax_backward_data "
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
            "_scaled_dot_product_efficient_attention "
            "_scaled_dot_product_efficient_attention_backward _unsafe_view _to_copy _foreach_copy_"
        ),
        "torch:ops.aten.mm.default": "_schema",
        "torch:ops.torch_attn": "_varlen_attn_backward",
    }
)
MODEL_PACKAGES = ("torch", "bitsandbytes", "transformers", "peft")


def check_interfaces(*packages: str) -> None:
    """Raise `UserError` if an installed release of these packages lacks a needed name."""
    _check([interface for interface in INTERFACES if interface.package in packages])


def check_recordings() -> None:
    """Raise `UserError` if torch lacks a name for recordings."""
    import_module("torch.nn.attention.varlen")  # it registers operators
    _check(RECORDING_INTERFACES)


def _check(interfaces: Iterable[Interface]) -> None:
    for interface in interfaces:
        if not interface.is_there():
            raise UserError(
                f"{interface.package} {version(interface.package)} has no "
                f"{interface.owner}.{interface.name}, which this workflow uses. Install the "
                f"release that {shipped_path('envs/pins.txt')} names."
            )

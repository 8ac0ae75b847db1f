"""NF4 stacks of experts in a stock model: 4 bits in memory, decoded at each use.

Transformers' bitsandbytes quantizer knows linears alone. A stack is stored as one linear of shape
(experts * out, in), so stock code loads it as such a linear (`with_linears`), onto the device of
its choice. `pack_` then replaces the parameter of the experts' module by an `NF4Tensor` of the
shape that the family expects. Every operation decodes it, so experts run by any of Transformers'
implementations, and PEFT wraps the parameter as any other.

Stacks of a merged model are made expert by expert and written in the family's published form.

PEFT has an adapter on stacks as `target_parameters`. It reads the names of a mixture's target
modules as those of Transformers 4, in which every expert was a module: in Qwen's family,
`gate_proj` of a dense layer or a shared expert would mean the stacks. Linears of such names are
exported as `target_parameters` too, by their weight."""

import copy
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_blockwise
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from workflow.lib.checkpoints.converted_reader import ConvertedReader, ModuleNames
from workflow.lib.checkpoints.decoded_reader import DecodedReader
from workflow.lib.checkpoints.decoder_layers import ExpertStack
from workflow.lib.checkpoints.files.stack_names import PREFIX
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.model.architecture.adapter_targets import adapter_scale, by_pattern
from workflow.lib.model.nf4_model import HAS_ITS_VALUE


def adapted_paths(adapter: Iterable[str]) -> set[str]:
    """Return the paths of all adapted linears and stacks, by names in training."""
    suffix = ".lora_A.weight"
    return {
        name.removeprefix(PREFIX).removesuffix(suffix) for name in adapter if name.endswith(suffix)
    }


def without_stacks(
    adapter: Mapping[str, torch.Tensor], stacks: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors outside of stacks, by names in training."""
    paths = {f"{PREFIX}{path}" for path in stacks}
    return {
        name: tensor for name, tensor in adapter.items() if name.partition(".lora_")[0] not in paths
    }


def exported_config(
    config: Mapping[str, Any], names: ModuleNames, adapter: Iterable[str]
) -> dict[str, Any]:
    """Return the `adapter_config.json` from which stock PEFT builds the adapter. config: of the
    training; adapter: names in training. A family without experts keeps its config."""
    stacks, projections = names.stacks, names.expert_projections
    if not projections and not stacks:  # of a mixture all layers may be dense
        return dict(config)
    adapted = adapted_paths(adapter)
    linears = adapted - stacks.keys()
    taken = sorted(path for path in linears if path.rpartition(".")[2] in projections)
    weights = {path: f"{path}.weight" for path in taken}
    parameters = [*(path for path in stacks if path in adapted), *weights.values()]
    exported = dict(config) | {
        "target_modules": _targets(linears - weights.keys(), names.model),
        "exclude_modules": None,
    }
    if not parameters:
        return exported
    return exported | {
        "target_parameters": parameters,
        "lora_dropout": 0.0,  # PEFT has none for parameters, and it only acts in training
        "rank_pattern": _with_weights(config["rank_pattern"], weights),
        "alpha_pattern": _with_weights(config["alpha_pattern"], weights),
    }


def _targets(paths: set[str], model: PreTrainedModel) -> list[str]:
    """Return the paths, or the name alone if all linears of that name are among them."""
    named: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            named.setdefault(path.rpartition(".")[2], set()).add(path)
    whole = {name for name, others in named.items() if others <= paths}
    return sorted({name if (name := p.rpartition(".")[2]) in whole else p for p in paths})


def _with_weights(patterns: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, Any]:
    """Return patterns of paths, with those of parameters that are such a path's weight."""
    values = {
        re.escape(weight): value
        for path, weight in weights.items()
        if (value := by_pattern(patterns, path)) is not None
    }
    return values | dict(patterns)


aten = torch.ops.aten


class NF4Tensor(torch.Tensor):
    """A weight (out, in), or stack (experts, out, in), held in memory as bitsandbytes' codes and
    scales. Results of operations are ordinary tensors. shape: the stored one; transposed: the
    tensor's own last two dims are (in, out)."""

    packed: torch.Tensor
    state: QuantState
    stored_shape: tuple[int, ...]
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        packed: torch.Tensor,
        state: QuantState,
        shape: tuple[int, ...],
        *,
        transposed: bool = False,
    ) -> "NF4Tensor":
        *experts, out_features, in_features = shape
        last = (in_features, out_features) if transposed else (out_features, in_features)
        made: NF4Tensor = torch.Tensor._make_wrapper_subclass(
            cls, (*experts, *last), dtype=state.dtype, device=packed.device
        )
        made.packed, made.state = packed, state
        made.stored_shape, made.transposed = shape, transposed
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's would print the weights
        return f"NF4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def decode(self) -> torch.Tensor:
        return self._decoded(self.packed, self.state, self.stored_shape)

    def expert(self, number: int) -> torch.Tensor:
        experts = self.stored_shape[0]
        state = copy.copy(self.state)
        state.absmax, state.nested = self._scales(number), False
        size = self.packed.shape[0] // experts
        return self._decoded(
            self.packed[number * size : (number + 1) * size], state, self.stored_shape[1:]
        )

    def _decoded(
        self, packed: torch.Tensor, state: QuantState, shape: tuple[int, ...]
    ) -> torch.Tensor:
        state = copy.copy(state)
        state.shape = torch.Size((math.prod(shape[:-1]), shape[-1]))
        weights = decoded(packed, state).view(shape)
        return weights.mT if self.transposed else weights

    def _scales(self, expert: int) -> torch.Tensor:
        """The fp32 scales of an expert, which may begin within a nested block."""
        scales: torch.Tensor = self.state.absmax
        if self.state.nested:
            scales = dequantize_blockwise(scales, self.state.state2) + self.state.offset
        return scales.view(self.stored_shape[0], -1)[expert]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as of an instance
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation as on an ordinary tensor; an index of one expert decodes it alone."""
        if func is aten.detach.default:  # a parameter is made of it
            (tensor,) = args
            return cls(
                tensor.packed, tensor.state, tensor.stored_shape, transposed=tensor.transposed
            )
        if func is aten.select.int and args[1] == 0 and args[0].dim() == 3:
            tensor, _, expert = args
            return tensor.expert(expert % tensor.shape[0])
        plain_args, plain_kwargs = tree_map_only(
            NF4Tensor, NF4Tensor.decode, (args, dict(kwargs or {}))
        )
        return func(*plain_args, **plain_kwargs)


# Begins the names of linears that stand for stacks: Transformers' conversions of published stacks
# do not match them.
LINEAR = "nf4_"


def linear_names(stacks: Iterable[str]) -> dict[str, str]:
    """Return Transformers' `key_mapping` from names of an NF4 checkpoint to those linears."""
    patterns = {
        (r"\.\d+".join(map(re.escape, re.split(r"\.\d+(?=\.)", parent))), name)
        for parent, _, name in (path.rpartition(".") for path in stacks)
    }
    return {rf"^({parent})\.{name}\.": rf"\1.{LINEAR}{name}." for parent, name in patterns}


def with_linears(
    family: type[PreTrainedModel], stacks: Mapping[str, ExpertStack]
) -> type[PreTrainedModel]:
    """Return a model's class with a linear (experts * out, in) for each of these stacks, named as
    in `linear_names`."""

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, *args, **kwargs)
        for path, stack in stacks.items():
            parent, _, name = path.rpartition(".")
            experts, out_features, in_features = stack.shape
            module = self.get_submodule(parent)
            delattr(module, name)
            linear = nn.Linear(in_features, experts * out_features, bias=False, device="meta")
            module.register_module(f"{LINEAR}{name}", linear)
            setattr(module, name, _initialized())  # the family's initialization looks for it

    # Transformers identifies the family by this name and module
    body = {"__init__": build, "__module__": family.__module__}
    return type(family.__name__, (family,), body)


def _initialized() -> torch.Tensor:
    tensor = torch.empty(0)
    setattr(tensor, HAS_ITS_VALUE, True)
    return tensor


def pack_(model: nn.Module, stacks: Mapping[str, ExpertStack], *, linears: Collection[str]) -> None:
    """Put the parameters of the experts back in place of the loaded linears, in their order.
    stacks: of `expert_stacks` of the same model on the meta device; linears: names of 4-bit linears
    whose weight PEFT wraps as a parameter, which becomes an `NF4Tensor` too."""
    for path, stack in stacks.items():
        parent, _, name = path.rpartition(".")
        packed, state = _loaded(model, f"{parent}.{LINEAR}{name}")
        module = model.get_submodule(parent)
        delattr(module, f"{LINEAR}{name}")
        delattr(module, name)
        tensor = NF4Tensor(packed, state, stack.shape, transposed=stack.transposed)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    for path, module in [*model.named_modules()]:
        if isinstance(module, Linear4bit) and path.rpartition(".")[2] in linears:
            shape = (module.out_features, module.in_features)
            plain = nn.Linear(shape[1], shape[0], bias=False, device="meta")
            tensor = NF4Tensor(*_loaded(model, path), shape)
            plain.weight = nn.Parameter(tensor, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(path, plain.train(module.training))


def _loaded(model: nn.Module, path: str) -> tuple[torch.Tensor, QuantState]:
    linear = model.get_submodule(path)
    assert isinstance(linear, Linear4bit)
    weight = linear.weight
    assert isinstance(weight, Params4bit)
    return weight.data, weight.quant_state


def merged_stacks(
    adapter: Mapping[str, torch.Tensor],
    adapter_config: Mapping[str, Any],
    *,
    original: ConvertedReader,
    nf4: DecodedReader,
    onto: str,
    stacks: Mapping[str, ExpertStack],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name in the original's files and bf16 tensor of all published parts of the stacks.
    adapter: by names in training; onto: `dequantized` (the trained weights) or `original`; stacks:
    of `expert_stacks`. The sum is in fp32, rounded once."""
    for path, stack in stacks.items():
        name = f"{path}.weight"
        if onto == "dequantized" and nf4.in_few_bits(name):
            stored = nf4.nf4_weight(name)
            weights = iter(NF4Tensor(*stored, stack.shape, transposed=stack.transposed))
        else:
            weights = original.experts(path)
        changes = _changes(adapter, path, scale=adapter_scale(adapter_config, path), stack=stack)
        experts = (
            (weight.float() + change).to(torch.bfloat16)
            for weight, change in zip(weights, changes, strict=True)
        )
        yield from original.published(path, experts)


def _changes(
    adapter: Mapping[str, torch.Tensor], path: str, *, scale: float, stack: ExpertStack
) -> Iterator[torch.Tensor]:
    """Yield s B A of each expert in the family's own orientation, fp32; zero without an adapter.
    PEFT keeps A as (experts, rank, in) by rows, and B as (out, rank, experts) by columns."""
    num_experts, out_features, in_features = stack.shape
    key = f"{PREFIX}{path}.lora_"
    if f"{key}A.weight" not in adapter:
        yield from torch.zeros(()).expand(num_experts)
        return
    a_weights = adapter[f"{key}A.weight"].float().view(num_experts, -1, in_features)
    b_weights = adapter[f"{key}B.weight"].float().view(out_features, -1, num_experts)
    for expert in range(num_experts):
        change = scale * (b_weights[..., expert] @ a_weights[expert])
        yield change.T if stack.transposed else change

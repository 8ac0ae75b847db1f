"""PEFT's LoRA layer on an `FrozenLinear`, computed by fused nodes where possible.

It uses a fused node when one adapter without bias is active and not merged, and PEFT's own forward
otherwise.

Linears of one module with the same input share a node (`share_input_`). The first call computes all
values and attaches the others' to the input until their own calls. So forward reads the input once
for all adapters, backward recomputes it once where it came from a norm, and the matmuls accumulate
its gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLoraLinear
from peft.tuners.lora.layer import LoraVariant
from torch import nn

from workflow.lib.kernels.rows.dropout import Draw
from workflow.lib.model.layers.adapter_dropout import AdapterDropout, AdapterState
from workflow.lib.model.layers.dora import Magnitude, direction_norms
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linear
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmul, nf4_lora_matmuls

ADAPTER = "default"  # PEFT's name of the only adapter; it does not appear in exported files


class NF4Dora(LoraVariant):
    """DoRA on an `FrozenLinear`, as PEFT's extension; `lora.init_adapters_` fills magnitudes."""

    @staticmethod
    def init(module: Any, adapter_name: str, **unused: Any) -> None:
        """Give `module` its magnitudes, after PEFT has added A and B."""
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        module.lora_magnitude_vector[adapter_name] = Magnitude(module.out_features)

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **unused: Any
    ) -> torch.Tensor:
        """Never called: `FusedLoraLinear` computes one adapter with DoRA itself."""
        raise NotImplementedError(f"{active_adapter} and other adapters at once, with DoRA")


class FusedLoraLinear(PeftLoraLinear):
    """PEFT's LoRA layer on an `FrozenLinear`: dequantization, matmul, adapter, dropout and DoRA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = AdapterState()
        self.beside: SharedInput | None = None
        """The linears that share its input."""
        self.changed_in_place = False
        """Whether the family may change its value."""
        for name, dropout in self.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                self.lora_dropout[name] = AdapterDropout(dropout.p)

    def share(self, state: AdapterState, *, number: int) -> None:
        """Share the state with the other linears; number: of this one among them."""
        self.shared = state
        for dropout in self.lora_dropout.values():
            if isinstance(dropout, AdapterDropout):
                dropout.share(state, linear=number)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Variants of this layer, by PEFT's names of their settings."""
        return {(): None, ("use_dora",): NF4Dora}

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Return x W^T + b + s (drop(x) A^T) B^T, with DoRA as in `dora`; x: (..., in_features)."""
        if args or kwargs or not self._is_plain():
            return super().forward(x, *args, **kwargs)
        if self.has_dora() and self.fused_draw() is not None:
            return self._dropped_dora(x)
        value = None if self.beside is None else self.beside.value(self, x)
        return nf4_lora_matmul(x, self) if value is None else value

    def _dropped_dora(self, x: torch.Tensor) -> torch.Tensor:
        """Return f (W d + s B A d) + W (x - d) + b for d = drop(x), as PEFT computes it."""
        kept, base = self.lora_dropout[ADAPTER](x), self.get_base_layer()
        assert isinstance(base, FrozenLinear)
        (y,) = nf4_lora_matmuls(kept, [self], draws=[None])
        return y + frozen_linear(x - kept, base, bias=False)

    def get_base_layer(self) -> nn.Module:
        """Return the base linear; PEFT's way through all levels is slower than everything else."""
        base: nn.Module | None = self._modules["base_layer"]
        assert base is not None
        return base

    def fused_scale(self) -> float:
        """Return the factor of B A."""
        scale: float = self.scaling[ADAPTER]
        return scale

    def fused_draw(self) -> Draw | None:
        """Return the draw of the dropout of the adapter's input; None without dropout."""
        dropout = self._modules["lora_dropout"]._modules[ADAPTER]  # type: ignore[union-attr]
        return dropout.draw() if isinstance(dropout, AdapterDropout) else None

    def fused_magnitude(self) -> torch.Tensor:
        """Return DoRA's magnitudes (out_features,), gathered if FSDP has gathered them."""
        magnitude = self.lora_magnitude_vector[ADAPTER].weight
        assert isinstance(magnitude, torch.Tensor)
        return magnitude

    def has_dora(self) -> bool:
        """Whether DoRA trains the magnitudes of rows."""
        return bool(self.lora_variant)

    def fused_factor(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return DoRA's m / n (out_features,) fp32, for W in `dtype`; None without DoRA."""
        if not self.has_dora():
            return None
        norms = self.shared.norms(self, lambda: direction_norms(self, dtype=dtype))
        return self.fused_magnitude() / norms

    def fused_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masters A (r, in_features) and B (out_features, r), gathered by FSDP."""
        parts: dict[str, Any] = self._modules  # attribute access would search for each anew
        a_weight, b_weight = (
            parts[name]._modules[ADAPTER]._parameters["weight"] for name in ("lora_A", "lora_B")
        )
        return a_weight, b_weight

    def can_share_node(self) -> bool:
        """Whether a shared node can compute this linear now. DoRA with dropout runs linear by
        linear: PEFT drops the input of W, too."""
        return self._is_plain() and not (self.has_dora() and self.fused_draw() is not None)

    def _is_plain(self) -> bool:
        return (
            isinstance(self.get_base_layer(), FrozenLinear)
            and not self.disable_adapters
            and not self.merged
            and list(self.active_adapters) == [ADAPTER]
            and self.lora_B[ADAPTER].bias is None
        )


def share_state(model: nn.Module) -> AdapterState:
    """Make all adapters of a model share one state; return it. Linears are numbered in order."""
    state = AdapterState()
    layers = [layer for layer in model.modules() if isinstance(layer, FusedLoraLinear)]
    for number, layer in enumerate(layers):
        layer.share(state, number=number)
    return state


# attribute of an input: the other layers' values, and the input's version then
VALUES = "workflow_values"


class SharedInput:
    """`FusedLoraLinear`s that a module calls with the same tensor."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)

    def value(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's value for x (..., in_features); None if the node cannot compute it."""
        waiting, version = getattr(x, VALUES, ({}, None))
        if layer in waiting and version == x._version:
            value: torch.Tensor = waiting.pop(layer)
            return value
        if not all(each.can_share_node() for each in self._layers):
            return None
        made = dict(zip(self._layers, nf4_lora_matmuls(x, self._layers), strict=True))
        value = made.pop(layer)
        setattr(x, VALUES, (made, x._version))
        return value


def share_input_(layers: Sequence[Any]) -> None:
    """Make layers compute their values together; does nothing for a single layer."""
    shared = SharedInput(layers) if len(layers) > 1 else None
    for layer in layers:
        layer.beside = shared

"""Experts in one node against the family's own module with PEFT's adapters on its parameters: every
kind of experts module, values and all gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.stacks import packed_stack
from workflow.lib.checkpoints.decoder_layers import experts_modules, matmul_names
from workflow.lib.kernels.experts import grouped_matmul as grouped_products
from workflow.lib.kernels.experts.gates import GateForm
from workflow.lib.model.experts import expert_matmul as expert_products
from workflow.lib.model.experts import fused_experts
from workflow.lib.model.experts.expert_matmul import FusedLoraStack, value
from workflow.lib.model.experts.fused_experts import FusedExperts
from workflow.lib.model.layers import frozen_stack
from workflow.lib.model.layers.frozen_linear import FrozenLinear, MatmulPrecision
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.lora_linear import ADAPTER
from workflow.lib.system.errors import UserError

EXPERTS, HIDDEN, INTERMEDIATE, RANK, TOKENS, TOP_K = 5, 48, 80, 3, 13, 2
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "num_experts_per_tok": TOP_K,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},  # transposed, interleaved, biases, its own gate
    "nemotron_h": {  # no gate
        "n_routed_experts": EXPERTS,
        "layers_block_type": ["moe", "attention"],
    },
}
"""One of each kind of experts module."""


WIDE = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Sizes of which some columns, too, are whole blocks."""


def stock_experts(family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))
    model = AutoModelForCausalLM.from_config(config).float()
    (module, *_) = (module for _, module in experts_modules(model))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    module.config._experts_implementation = "eager"
    return module


class Pair:
    """A family's experts with PEFT's adapters, and ours with the same weights."""

    def __init__(self, family: str, **changes: Any) -> None:
        original = stock_experts(family, **changes)
        self.names = matmul_names(original)
        stacks = {}
        for name in self.names:
            stored = getattr(original, name).data
            weights = stored.transpose(1, 2) if original.is_transposed else stored
            stacks[name] = packed_stack(weights.contiguous())
            decoded = stacks[name].dequantize_experts(0, EXPERTS, torch.float32)
            stored.copy_(decoded.transpose(1, 2) if original.is_transposed else decoded)
        self.ours = nn.ModuleDict({"experts": fused_experts._fused(original, stacks)})
        theirs = nn.ModuleDict({"experts": original})
        options: dict[str, Any] = {"r": RANK, "lora_alpha": 5}
        self.theirs = get_peft_model(
            theirs,  # type: ignore[arg-type]
            LoraConfig(target_parameters=[f"experts.{n}" for n in self.names], **options),
        )
        config = LoraConfig(target_modules=[*self.names], **options)
        config._register_custom_module({FrozenStack: FusedLoraStack, FrozenLinear: FusedLoraStack})
        get_peft_model(self.ours, config)  # type: ignore[arg-type]
        self._same_adapters()

    def _same_adapters(self) -> None:
        """Give both the same random A and B. PEFT wraps the wrapper of another parameter."""
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        wrappers, module = {}, self.theirs.base_model.model["experts"]
        while hasattr(module, "parameter_name"):
            wrappers[module.parameter_name], module = module, module.base_layer
        for name in self.names:
            layer = self.experts.get_submodule(name)
            for part in ("lora_A", "lora_B"):
                ours, theirs = (getattr(x, part)[ADAPTER].weight for x in (layer, wrappers[name]))
                assert ours.shape == theirs.shape
                nn.init.normal_(theirs, std=0.3)
                ours.data.copy_(theirs.data)
                self.pairs.append((ours, theirs))

    @property
    def experts(self) -> FusedExperts:
        module = self.ours["experts"]
        assert isinstance(module, FusedExperts)
        return module

    def gradients(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, ours and theirs of y and all gradients. Expert 3 gets no token."""
        draw = torch.Generator().manual_seed(1)
        hidden = self.experts.down_proj.get_base_layer().expert_rows  # type: ignore[operator]
        x = torch.randn(TOKENS, hidden, generator=draw)
        chances = torch.rand(TOKENS, EXPERTS, generator=draw)
        chances[:, 3] = -1.0
        weights, index = chances.topk(TOP_K)
        grad = torch.randn(x.shape, generator=draw)
        results = []
        for number, experts in enumerate(
            (self.ours["experts"], self.theirs.base_model.model["experts"])
        ):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            y = experts.forward(leaves[0], index, leaves[1])
            masters = [pair[number] for pair in self.pairs]
            results.append([y, *torch.autograd.grad(y, [*leaves, *masters], grad)])
        names = ("y", "x", "router's weights", "A", "B", "A", "B")
        yield from zip(names, *results, strict=True)


@pytest.fixture(params=FAMILIES)
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", GateForm("silu")),
        ("gpt_oss", GateForm("clamped", alpha=1.702, limit=7.0)),
        ("nemotron_h", None),
    ],
)
def test_gate_is_one_that_the_kernels_know_or_none(family, form):
    assert Pair(family).experts.gate.form == form


def assert_same(pair, *, tolerance=1e-5):
    for name, ours, theirs in pair.gradients():
        largest = float(theirs.detach().abs().max())
        assert largest > 0, name
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_values_and_gradients_are_those_of_the_family_with_pefts_adapters(pair):
    """fp32 on both sides; PEFT adds the update to the weight, so sums have another order."""
    assert_same(pair)


def test_expert_without_tokens_has_no_gradient(pair):
    _, _, _, *masters = pair.gradients()
    for name, ours, _ in masters:
        of_expert = (
            ours.view(EXPERTS, RANK, -1)[3]
            if name == "A"
            else ours.view(-1, RANK, EXPERTS)[:, :, 3]
        )
        assert not of_expert.any()
        assert ours.any()


def test_cut_weights_give_the_same(monkeypatch):
    """The workspace holds a third of the first stack: its rows, and in backward its columns, are
    decoded in several slices."""
    pair = Pair("gpt_oss", **WIDE)
    stack = pair.experts.gate_up_proj.get_base_layer()
    assert isinstance(stack, FrozenStack)
    half = 4 * stack.out_features * stack.in_features // 2
    monkeypatch.setattr(frozen_stack, "DECODED_BYTES", half)
    assert len([*stack.row_slices(torch.float32)]) == 2
    assert len([*stack.column_slices(torch.float32)]) == 2
    assert_same(pair)


def test_grouped_products_of_gpus_give_the_same(pair, monkeypatch):
    """By torch's own grouped matmul, which CPUs have too; ranks are filled up to whole units."""
    monkeypatch.setattr(expert_products, "GPUS", frozenset({"cpu"}))
    monkeypatch.setattr(grouped_products, "_torch_groups", lambda rows: True)
    monkeypatch.setattr(grouped_products, "_ranges", None)
    assert_same(pair)


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_float8_rounds_the_products_of_frozen_weights(ways):
    """As e4m3 does: 3 bits behind the leading one of weights, activations and gradients."""
    pair = Pair("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    exact = [ours for _, ours, _ in pair.gradients()]
    types = MatmulPrecision(forward=ways[0], backward=ways[1])
    for name in pair.names:
        pair.experts.get_submodule(name).get_base_layer().matmul_precision = types
    assert all(map(torch.equal, exact, (ours for _, ours, _ in pair.gradients())))
    with types.in_eight_bits():
        rounded = [ours for _, ours, _ in pair.gradients()]
    errors = [
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(rounded, exact, strict=True)
    ]
    assert max(errors) < 0.1
    y, x, *_ = errors
    assert (y > 1e-3, x > 1e-3) == (ways[0], True)


def test_recomputation_ends_before_the_last_product(pair, monkeypatch):
    products = []
    monkeypatch.setattr(fused_experts, "value", lambda *x: products.append(1) or value(*x))
    forward = pair.experts.forward

    def recomputed(*inputs):
        y: torch.Tensor = checkpoint(forward, *inputs, use_reentrant=False)
        return y

    monkeypatch.setattr(pair.experts, "forward", recomputed)
    assert_same(pair)
    assert len(products) == 3


def test_experts_that_compute_something_else_are_refused():
    module = stock_experts("qwen3_moe")
    usual = type(module)

    def scaled(self, *inputs):
        y: torch.Tensor = 2.0 * usual.forward(self, *inputs)
        return y

    module.__class__ = type("Other", (usual,), {"forward": scaled})
    with pytest.raises(UserError, match=r"Other \(mlp.experts\) is not supported"):
        fused_experts._check_family(module, "mlp.experts")

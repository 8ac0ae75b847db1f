"""How a family's class makes logits of its last hidden states, tried on random values.

Cohere multiplies the head's matmul, Granite divides it, MiniCPM 3 divides the states before it,
Gemma 2 caps it. In the trial the class's own forward gets given states in place of its decoder's,
and a head that returns what it gets: the result is the form itself, at many magnitudes at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.kernels.loss.fused_logits import LogitForm
from workflow.lib.model.loss.chunked_loss import OutputHead
from workflow.lib.model.tried_classes.magnitudes import alike, magnitudes
from workflow.lib.system.errors import UserError

SMALL, LARGE = 2.0**-40, 2.0**40  # without and with the whole effect of any cap
WIDTH = 16  # values of a magnitude
TOLERANCE = 1e-5  # some families compute a cap in float32


class _States(BaseModelOutputWithPast):
    """A decoder's output with its last states alone; other parts are None."""

    def __getattr__(self, name: str) -> None:
        return None


def tried_head(model: PreTrainedModel, *, fused: bool = True) -> OutputHead:
    """Return the head of a causal LM, on any device, with the scale and cap of its class; fused: as
    in `OutputHead`. Raises `UserError` if the class computes something else."""
    head: Any = model.get_output_embeddings()
    owner = next(x for x in model.modules() if any(part is head for part in x.children()))
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0] = 1.0
    cause = ""
    at = torch.tensor([SMALL, LARGE, *magnitudes(owner)], dtype=torch.float64)
    states = (at[:, None] * values).bfloat16().double()  # some classes cast to their head's dtype
    try:
        logits = _logits(model, owner, head, states, bias=0.0)
        scale, most = float(logits[0, 0].float()) / SMALL, float(logits[1, 0])
        capped = abs(most - scale * LARGE) > TOLERANCE * abs(scale) * LARGE
        form = LogitForm(scale, most if capped else None)
        output_head = OutputHead(head, *form, fused)
        agrees = all(
            alike(x.float(), y, tolerance=TOLERANCE)
            for bias in ((0.0,) if getattr(head, "bias", None) is None else (0.0, 1.0))
            for x, y in zip(
                _logits(model, owner, head, states, bias=bias),
                output_head.finished(states + bias),
                strict=True,
            )
        )
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
        agrees, cause = False, f" ({type(error).__name__}: {str(error)[:200]})"
    if not agrees:
        raise UserError(
            f"{type(owner).__name__} is not supported: it computes logits otherwise than by its "
            f"head, a factor and a soft cap{cause}. Choose another model.source."
        )
    return output_head


def _logits(
    model: PreTrainedModel, owner: Any, head: nn.Module, states: torch.Tensor, *, bias: float
) -> torch.Tensor:
    """Return what the owner of a head makes of states (rows, width) that its head returns plus
    `bias`, in their shape."""
    decoder_output = _States(last_hidden_state=states[None])
    layer = decoder_layers(model)[0]
    around = {x for x in owner.modules() if layer in {*x.modules()}} - {owner, layer}
    forwards: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(
        around, lambda *_, **__: decoder_output
    )
    ids = torch.zeros(1, len(states), dtype=torch.long)
    with _calling(forwards | {head: lambda x: x + bias}), torch.no_grad():
        made: torch.Tensor = owner(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return made


@contextmanager
def _calling(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block modules call these functions as their forward."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward

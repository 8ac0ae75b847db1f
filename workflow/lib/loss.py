"""Cross-entropy of the output head over trained positions only, in chunks: the logits of a whole batch never exist.

The gradient with respect to the hidden states is computed chunk by chunk in the forward, and that of a head which is trained
(`lora.modules_to_save`) is summed there, so backward needs no logits. The idea is that of
fused linear cross-entropy (Liger, arXiv 2410.10989); masked rows are dropped before the product (TRL's chunked_nll).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from workflow.lib.attention import FLATTENED, document_bounds, flash_arguments
from workflow.lib.embedding import embed_rows
from workflow.lib.loss_scale import LossScale
from workflow.lib.slices import GRADIENT_ROWS, chunk_rows
from workflow.lib.stash import Stash
from workflow.lib.unfrozen import MasterRows, trained_parts


@dataclass(frozen=True)
class OutputHead:
    """logits = softcap * tanh(scale * head(h) / softcap), without the cap if it is None; fp32."""

    module: nn.Module
    scale: float
    softcap: float | None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits (rows, vocab) of hidden states (rows, hidden_size)."""
        return self.finished(self.module(hidden))

    def finished(self, product: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits that the head's product means; element by element, so of any part of it too."""
        logits = product.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def output_head(module: nn.Module, config: PretrainedConfig) -> OutputHead:
    """Return a model family's head: Cohere multiplies its output, Granite divides it, Gemma 2 caps it.

    A family that does something else is found out by `setup.startup_checks`.
    """
    scale = _number(config, "logit_scale") / _number(config, "logits_scaling")
    return OutputHead(module, scale, getattr(config, "final_logit_softcapping", None))


def _number(config: PretrainedConfig, key: str) -> float:
    """Return a factor of a model's configuration; 1 if it has none, or MPT's null."""
    value = getattr(config, key, None)
    return float(value) if isinstance(value, int | float) else 1.0


class LinearCrossEntropy(nn.Module):
    """Sum of -log softmax(logits)[target] over rows. Uses the model's own head."""

    def __init__(self, head: OutputHead) -> None:
        super().__init__()
        self.head = head  # no module, so that the model's head is no submodule of this one

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Return the summed loss () fp32, or the fp32 logits (rows, vocab) if `targets` is None.

        hidden: (rows, hidden_size); targets: (rows,) int64. No rows give a loss of 0 that still has a gradient.
        """
        if targets is None:
            return self.head.logits(hidden)
        loss: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, targets, self.head, *trained_parts(self.head.module)
        )
        return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        head: OutputHead,
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        wants_grad = ctx.needs_input_grad[0]
        trained = TrainedHead(masters, hidden.dtype) if wants_grad and masters else None
        grad = torch.empty_like(hidden) if wants_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = chunk_rows(1, vocab_size=head.vocab_size)
        # The head runs even for no rows: FSDP counts on it.
        for start in range(0, max(1, hidden.shape[0]), size):
            rows = slice(start, start + size)
            if trained is None:
                loss, chunk_grad = _chunk(hidden[rows], targets[rows], head, wants_grad=wants_grad)
            else:
                loss, chunk_grad = _trained_chunk(hidden[rows], targets[rows], head, trained)
            total += loss
            if grad is not None:
                assert chunk_grad is not None
                grad[rows] = chunk_grad
        ctx.grad, ctx.of_head = grad, trained.gradients if trained else []
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None  # else it lies there as long as the loss does
        of_head, ctx.of_head = ctx.of_head, []
        return grad.mul_(grads[0]), None, None, *(x.mul_(grads[0]) for x in of_head)


def _chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: OutputHead,
    *,
    wants_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a chunk's summed loss and its gradient with respect to `hidden`."""
    with torch.set_grad_enabled(wants_grad):
        leaf = hidden.detach().requires_grad_(wants_grad)
        loss = nn.functional.cross_entropy(head.logits(leaf), targets, reduction="sum")
        grad = torch.autograd.grad(loss, leaf)[0] if wants_grad else None
    return loss.detach(), grad


class TrainedHead:
    """A trained head's weight (vocab, hidden) and bias (vocab,) in the compute type, and their gradients in fp32, summed over chunks of rows."""

    def __init__(self, masters: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.weight, *self._bias = (master.to(dtype) for master in masters)
        self.gradients = [torch.zeros_like(master) for master in masters]

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the product (rows, vocab) of hidden states (rows, hidden) as a leaf that wants a gradient."""
        return nn.functional.linear(hidden, self.weight, *self._bias).requires_grad_()

    def backward(self, hidden: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """Add what the slope (rows, vocab) of a product means for weight and bias; return the gradient of the hidden states."""
        weight, *bias = self.gradients
        for start in range(0, len(weight), GRADIENT_ROWS):
            part = slice(start, start + GRADIENT_ROWS)
            weight[part] += slope[:, part].T @ hidden
        for gradient in bias:
            gradient += slope.sum(dim=0, dtype=torch.float32)
        return slope @ self.weight


def _trained_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: OutputHead, trained: TrainedHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's summed loss and its gradient with respect to `hidden`; add that of the head to `trained`."""
    product = trained.product(hidden)
    with torch.enable_grad():
        loss = nn.functional.cross_entropy(head.finished(product), targets, reduction="sum")
        (slope,) = torch.autograd.grad(loss, product)
    return loss.detach(), trained.backward(hidden, slope)


class CausalLMForTraining(nn.Module):
    """The module that is trained and sharded: a PEFT model, and the loss over chosen positions.

    Forward runs the decoder, picks the hidden states that predict a trained token, and returns their summed loss.
    """

    def __init__(self, peft_model: nn.Module) -> None:
        super().__init__()
        self.peft_model = peft_model
        causal_lm = peft_model.get_base_model()  # type: ignore[operator]
        head = output_head(causal_lm.get_output_embeddings(), causal_lm.config)
        self.head_loss = LinearCrossEntropy(head)
        self.stash: Stash | None = None
        """Where the decoder's activations wait for backward; None = where they are."""
        self.loss_scale: LossScale | None = None
        """In float16: what the loss is multiplied by for backward."""
        self.rows_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Embedding rows (n, hidden) of ids (n,), where the embedding has no whole and frozen table of its own."""
        embedding = causal_lm.get_input_embeddings()
        if embedding.weight.requires_grad:
            self.rows_of = MasterRows(embedding, causal_lm.config.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor | None,
        bounds: tuple[torch.Tensor, int] | None = None,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss () fp32 over `positions`, or their logits (n, vocab) fp32 if `targets` is None.

        input_ids, position_ids: (rows, seq_len) int64; a position 0 starts a document, which attention does not leave.
        bounds: `attention.document_bounds(position_ids)`, if it is known already (it waits for the device).
        embedded: the embedding rows (rows * seq_len, hidden) of input_ids, if they have been looked up already.
        positions: (n,) int64 into the flattened (rows * seq_len) hidden states; targets: (n,) int64, the tokens predicted there.
        """
        decoder = self.peft_model.get_base_model().get_decoder()  # type: ignore[operator]
        inputs = _decoder_inputs(decoder.config, input_ids, position_ids, bounds)
        inputs = self._embedded(inputs, embedded)
        with self._saving():
            hidden = decoder(**inputs).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, positions)
        loss: torch.Tensor = self.head_loss(chosen, targets)
        return loss

    def _saving(self) -> AbstractContextManager[None]:
        wanted = self.stash is not None and torch.is_grad_enabled()
        return self.stash.forward() if wanted and self.stash is not None else nullcontext()

    def family_logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (rows * seq_len, vocab) fp32 as the model family's own forward makes them."""
        causal_lm = self.peft_model.get_base_model()  # type: ignore[operator]
        inputs = _decoder_inputs(causal_lm.get_decoder().config, input_ids, position_ids, None)
        logits: torch.Tensor = causal_lm(**self._embedded(inputs, None)).logits
        return logits.flatten(0, 1).float()

    def _embedded(self, inputs: dict[str, Any], rows: torch.Tensor | None) -> dict[str, Any]:
        """Return a decoder's inputs with embeddings in place of ids, where rows are looked up outside of the model."""
        if self.rows_of is None:
            return inputs
        others = dict(inputs)
        ids = others.pop("input_ids")
        embedding = self.peft_model.get_base_model().get_input_embeddings()  # type: ignore[operator]
        rows = self.rows_of(ids.flatten()) if rows is None else rows
        return others | {"inputs_embeds": embed_rows(embedding, rows, ids.shape)}


def _decoder_inputs(
    config: PretrainedConfig,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    bounds: tuple[torch.Tensor, int] | None,
) -> dict[str, Any]:
    """Return what a decoder is called with. No attention mask: one of ones would switch off the document boundaries."""
    flash: dict[str, Any] = {}
    if config._attn_implementation in FLATTENED:
        flash = flash_arguments(*(bounds or document_bounds(position_ids)))
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False} | flash

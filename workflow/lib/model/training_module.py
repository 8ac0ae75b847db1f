"""The module that training calls: decoder, final norm, head and loss in one forward.

It takes a micro-batch and returns its summed loss, never logits of all positions."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from torch import nn

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.reference import attending_by_reference
from workflow.lib.model.activation_offload import ActivationOffload
from workflow.lib.model.architecture.routers import balance_coefficient
from workflow.lib.model.experts.router_balance import (
    RouterBalance,
    family_coefficient,
    router_balance,
)
from workflow.lib.model.host_embedding import LookedUp, look_up_elsewhere_, with_embeddings
from workflow.lib.model.layers.frozen_linear import MatmulPrecision, frozen_linears
from workflow.lib.model.layers.lora_linear import share_state
from workflow.lib.model.layers.token_tiles import tile_
from workflow.lib.model.lora import (
    ROWS,
    MasterRows,
    TrainedRows,
    routers_of,
    write_rows_,
)
from workflow.lib.model.loss.chunked_loss import LinearCrossEntropy
from workflow.lib.model.loss.loss_scale import LossScale
from workflow.lib.model.loss.tried_head import tried_head
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.prepared_decoder import PreparedDecoder
from workflow.lib.model.tried_classes.magnitudes import note_changes_in_place_
from workflow.lib.objectives.objective import NEXT_TOKEN, Objective
from workflow.lib.system.dtype_choice import COMPUTE_DTYPE, check_float8_shape

WAYS = ("forward", "backward")


class GatheredWeights(Protocol):
    """Weights that are gathered layer by layer (`packed_layers`)."""

    def free(self) -> None:
        """Free all but this process's slices."""

    def abandon(self) -> None:
        """Free them after a failed capture."""


def loss_in(result: torch.Tensor) -> torch.Tensor:
    """Return the loss () from the result of `CausalLMForTraining.forward`."""
    return result if result.dim() == 0 else result[0]


class CausalLMForTraining(nn.Module):
    """The trained and sharded module: a PEFT model and its objective. Forward runs the decoder,
    selects the hidden states that predict a trained token, and returns the objective's loss. The
    other methods return logits or hidden states, for checks. All gather weights, so all are
    collective."""

    def __init__(
        self, peft_model: nn.Module, *, fused_head: bool = True, objective: Objective = NEXT_TOKEN
    ) -> None:
        super().__init__()
        self.objective = objective
        self.peft_model = peft_model
        causal_lm = peft_model.get_base_model()  # type: ignore[operator]
        self.head_loss = LinearCrossEntropy(tried_head(causal_lm, fused=fused_head))
        self.adapters = share_state(peft_model)
        self._layers = decoder_layers(causal_lm)
        for layer in self._layers:
            note_changes_in_place_(layer)
        self.matmul_precision = MatmulPrecision()
        """Dtype of the matmuls of frozen weights."""
        self.activation_offload: ActivationOffload | None = None
        """Offload of the decoder's activations; None: they stay on the device."""
        self.packed_layers: GatheredWeights | None = None
        """Gathers the packed weights of decoder layers; None: all are on this process."""
        self.loss_scale: LossScale | None = None
        """In float16: the factor of the loss in backward."""
        self.reference: Any = None
        """The start of the run as the objective's reference (`training.start_reference`); None:
        scores of another model, or no reference."""
        self.rows_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Embedding rows (n, hidden) of ids (n,), if its table is not whole and frozen."""
        self.shares_prompts = False
        """Whether the documents of an example share their prompt in training steps."""
        self._known_rows: torch.Tensor | None = None
        """Those of the current micro-batch, if they are known."""
        self.router_balance: RouterBalance | None = None
        """The load-balancing loss of a mixture's routers, if any."""
        embedding = causal_lm.get_input_embeddings()
        if embedding.weight.requires_grad or hasattr(embedding, ROWS):
            self.rows_of = MasterRows(embedding, causal_lm.config.dtype)
        self._prepared = PreparedDecoder(causal_lm, self.adapters)

    def train(self, mode: bool = True) -> Self:
        """Without the objective's dropout all within decoder layers stays in evaluation: adapters
        and the family drop nothing. The layers themselves recompute in training alone."""
        super().train(mode)
        self.peft_model.train(mode and self.objective.dropout)
        for layer in self._layers:
            layer.training = mode
        if self.router_balance is not None:
            self.router_balance.training = mode
        return self

    @contextmanager
    def with_objective(self, objective: Objective) -> Iterator[None]:
        """Within the block forward returns the loss of another objective."""
        trained, self.objective = self.objective, objective
        try:
            yield
        finally:
            self.objective = trained

    def divide_(
        self, head_loss: LinearCrossEntropy, *, rows_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Take the loss and the embedding rows of slices of the vocabulary (`vocabulary_parallel`),
        and adapters that are gathered for each use."""
        self.head_loss, self.rows_of, self.adapters.sharded = head_loss, rows_of, True

    @property
    def recurrent_layers(self) -> int:
        """Number of layers that take packed documents one by one."""
        return self._prepared.recurrent_layers

    def row_obstacle(self) -> str | None:
        """Return why processes cannot share rows; None if they can."""
        return self._prepared.row_obstacle()

    def share_prompts_(self, *, rows_are_cut: bool = False) -> str | None:
        """Make documents of an example share their prompt; return why they cannot, or None."""
        obstacle = self._prepared.sharing_obstacle()
        if rows_are_cut:
            obstacle = "processes share rows"
        if self.router_balance is not None:
            obstacle = "the balance of routers is that of whole rows"
        self.shares_prompts = obstacle is None
        return obstacle

    def tile_(self, tokens: int) -> int:
        """Compute feed-forwards and experts in tiles of so many tokens, and the backward of
        attention in groups of heads; return how many modules have tiles."""
        self._prepared.in_head_groups = True
        return tile_(self.peft_model, self.adapters, tokens=tokens)

    def keep_attention_(self) -> KeptResults:
        """Keep attention's results in recomputed layers; return where they are."""
        self._prepared.kept = KeptResults()
        return self._prepared.kept

    def multiply_in_(self, dtype: str, passes: str) -> None:
        """Apply `train.matmul_dtype` to `train.matmul_passes`; raises `UserError` for a linear that
        float8 cannot multiply."""
        float8 = {way: dtype != COMPUTE_DTYPE and passes in ("both", way) for way in WAYS}
        self.matmul_precision = MatmulPrecision(**float8)
        for path, linear in frozen_linears(self.peft_model):
            if dtype != COMPUTE_DTYPE:
                path = path.removeprefix("base_model.model.").replace(".base_layer", "")
                check_float8_shape(path, linear.spec.shape, block_size=linear.spec.unit)
            linear.matmul_precision = self.matmul_precision

    def keep_decoded_(self, layers: Iterable[int]) -> None:
        """Keep what training steps decode of the frozen weights of these decoder layers."""
        for number in layers:
            for _, linear in frozen_linears(self._layers[number]):
                linear.kept = {}

    def balance_routers_(self, coefficient_setting: float | None) -> None:
        """Add the load-balancing loss of `train.router_aux_loss_coef`. Raises `UserError` if the
        family has no such loss, or an unknown one."""
        model = self.peft_model.get_base_model()  # type: ignore[operator]
        routers = routers_of(model)
        masters = [p for path in routers.values() for p in model.get_submodule(path).parameters()]
        coefficient = balance_coefficient(
            coefficient_setting,
            family_coefficient(model),
            routers_trained=any(p.requires_grad for p in masters),
            name=model.config.model_type,
        )
        if coefficient:
            self.router_balance = router_balance(model, coefficient, routers)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the objective's loss () fp32 of a micro-batch; with figures (1 + figures,), the
        loss first. In training its gradient, not its value, includes the routers' load-balancing
        loss."""
        self.adapters.row_keys = batch.row_keys
        self.adapters.offset = 0 if batch.cut is None else batch.cut.first
        balance = self.router_balance if self.training else None
        counting: AbstractContextManager[None] = nullcontext()
        if balance is not None:
            counting = balance.counting(batch.lengths, batch.input_ids.numel())
        with counting:
            hidden = self._hidden_states(batch.input_ids, batch.position_ids, batch)
        states = hidden.index_select(0, batch.positions)
        loss, figures = self.objective.loss(self.head_loss, states, batch)
        if balance is not None:
            loss = balance.joined(loss)
        return loss if figures is None else torch.cat([loss[None], figures])

    def trained_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the states (trained tokens, hidden) that predict them."""
        hidden = self._hidden_states(batch.input_ids, batch.position_ids, batch)
        return hidden.index_select(0, batch.positions)

    def after_backward(self) -> None:
        if self.activation_offload is not None:
            self.activation_offload.join()
        if self.packed_layers is not None:
            self.packed_layers.free()  # a graph must give back the memory that it has taken

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits (n, vocab) fp32 at `positions` (n,) of the flattened rows. input_ids,
        position_ids: (rows, seq_len) int64."""
        self.adapters.row_keys = None
        hidden = self._hidden_states(input_ids, position_ids)
        return self.head_loss.head.logits(hidden.index_select(0, positions))

    def _hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: MicroBatch | None = None
    ) -> torch.Tensor:
        """Return the decoder's last hidden states (rows * seq_len, hidden). batch: with these rows;
        None: its other fields are unknown."""
        decoder = self.peft_model.get_base_model().get_decoder()  # type: ignore[operator]
        inputs = self._prepared.inputs(
            input_ids,
            position_ids,
            bounds=None if batch is None else batch.bounds,
            documents=None if batch is None else batch.documents,
            shared=None if batch is None else batch.shared,
            cut=None if batch is None else batch.cut,
        )
        with self._embedding(None if batch is None else batch.embedded), self._saving():
            hidden: torch.Tensor = decoder(**inputs).last_hidden_state
        return hidden.flatten(0, 1)

    def _saving(self) -> AbstractContextManager[None]:
        if self.activation_offload is None or not torch.is_grad_enabled():
            return nullcontext()
        return self.activation_offload.forward()

    def family_logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (rows * seq_len, vocab) fp32 by the family's own forward."""
        causal_lm = self.peft_model.get_base_model()  # type: ignore[operator]
        inputs = self._prepared.inputs(input_ids, position_ids)
        with self._embedding(None):
            logits: torch.Tensor = causal_lm(**with_embeddings(causal_lm, inputs)).logits
        return logits.flatten(0, 1).float()

    def hidden_states(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the decoder's last states (rows * seq_len, hidden) for rows (rows, seq_len)."""
        return self._hidden_states(input_ids, position_ids)

    def family_hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the same with the family's own eager attention; raises `UserError` as
        `attending_by_reference` does."""
        causal_lm = self.peft_model.get_base_model()  # type: ignore[operator]
        with attending_by_reference(causal_lm.get_decoder().config):
            return self.hidden_states(input_ids, position_ids)

    @contextmanager
    def _embedding(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Within the block the embedding reads its rows from outside of the model, if they are
        there; rows: the tokens' embeddings, if known."""
        causal_lm = self.peft_model.get_base_model()  # type: ignore[operator]
        embedding = causal_lm.get_input_embeddings()
        write_rows_(causal_lm)
        if self.rows_of is not None and not isinstance(embedding, LookedUp):
            look_up_elsewhere_(embedding, self._look_up)
        self._known_rows = rows
        try:
            yield
        finally:
            self._known_rows = None

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.rows_of is not None
        rows = self.rows_of(ids) if self._known_rows is None else self._known_rows
        embedding = self.peft_model.get_base_model().get_input_embeddings()  # type: ignore[operator]
        trained: TrainedRows | None = getattr(embedding, ROWS, None)
        return rows if trained is None else trained.over(rows, ids)

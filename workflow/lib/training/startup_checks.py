"""Checks before the first step: gathered bytes against the checkpoint, packed rows against the
family's own forward of each document, and gradients against those without recomputation."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from workflow.lib.artifacts.training_record import Check
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.checkpoints.meta_model import said_by
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.weight_checks import fair_share, local_bytes, mismatched_tensors
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.distributed.world import World, decide_kernels
from workflow.lib.kernels.attention.attention_choice import FLEX
from workflow.lib.kernels.attention.reference import attending_by_reference
from workflow.lib.model.compared_layers import ComparedLayers
from workflow.lib.model.nf4_model import local
from workflow.lib.model.recomputation import nothing_recomputed, recomputes
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.objective import NEXT_TOKEN
from workflow.lib.settings.config import TrainConfig
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.dtype_choice import COMPUTE_DTYPE, FLOAT8
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.training.batches import cut_rows, make_batch, shared_lengths, stored_batch
from workflow.lib.training.build import TrainingModel
from workflow.lib.training.start_reference import token_losses

PACKED_TOKENS = 256  # compared with the family's own attention
PACKED_SHARES = (0.5, 0.3, 0.2)  # of them in each document
ROWS_LOOKED_AT = 64  # searched for several documents in a row
# Share of a layer's addition to the hidden states (root mean squares): bf16's rounding is one to
# four percent, attention across documents more than half.
PACKED_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 0.01}
# Share of the last hidden states: a recurrent state that crosses documents may add little in one
# layer (1 to 10% in a tiny Falcon H1), and adds up over all.
GROWN_TOLERANCE = 0.1
FAMILY_TOKENS = 8  # compared with the family's own forward
# Share of the largest logit: far above bf16's rounding, far below any scale or cap.
FAMILY_TOLERANCE = 0.05
GROWN = 4.0  # factor of the last hidden states from token to token: a cap must show
# Share of the size of all gradients. Recomputation repeats forward bit by bit; new noise in the
# router of a tiny Phi-3.5-MoE changes them by 0.2.
RECOMPUTED_TOLERANCE = 0.02
# With SmolLM2-135M float8 changes the loss of a token by 0.2 nats, and their mean by 0.002.
TOKENS = 8192

logger = logging.getLogger("workflow")


def _check(name: str, detail: str) -> Check:
    logger.debug("checked: %s", name)
    return Check(name=name, passed=True, detail=detail)


def check_inputs(files: list[RecordedFile], world: World) -> Check:
    """Hash base and tokens, each file on one process; return the report's check. Collective. Raises
    `UserError` if a file differs from the record of its stage."""
    check_recorded(files, world=world)
    num_bytes = sum(file.path.stat().st_size for file in files)
    detail = f"{len(files)} files, {num_bytes:,} bytes"
    return _check("base and tokens have their recorded SHA-256", detail)


def startup_checks(
    model: TrainingModel, store: TokenStore, base: Checkpoint, world: World
) -> list[Check]:
    """Run the checks before the first step; return them for the report. Collective. Raises
    `UserError` if our logits or hidden states are not the family's, recomputation changes
    gradients, a gathered tensor differs from the checkpoint, or a row has no trained token."""
    model.training.eval()  # no dropout: it would make two forwards differ
    same_logits = check_family(model.training, store, world)
    world.moved()
    same_attention = check_attention(model.training, store, world)
    world.moved()
    _forward_first_row(model.training, store, world)
    decide_kernels(world)  # the passes above have compared them
    return [
        same_logits,
        same_attention,
        _check_weights(model, base, world),
        _check_share(model, world),
        _check_rows(store),
        *check_recomputation(model.training, store, world),  # with the right weights
        *check_shared_prompts(model.training, store, world),
        *check_shared_rows(model.training, store, world),
    ]


def _forward_first_row(training: CausalLMForTraining, store: TokenStore, world: World) -> None:
    """Set FSDP up by a first forward, before units are gathered by hand. Collective."""
    batch = cut_rows(stored_batch(store, np.arange(1)), world.context).to(world.device)
    token_losses(training, [batch], training.objective)


def _check_weights(model: TrainingModel, base: Checkpoint, world: World) -> Check:
    with base.stored() as reader:
        wrong = mismatched_tensors(
            model.training, model.units, reader, world, masters=not model.continues
        )
        packed = model.packed_layers
        wrong += packed.mismatched(reader) if packed else []
        count = len(reader.names())
    if wrong:
        raise UserError(
            f"{len(wrong)} tensors differ from the checkpoint after gathering, first {wrong[0]}: "
            "the weights would be silently wrong. Check the files in "
            f"{base.folder} (SHA256SUMS); if they are whole, report this with your versions of "
            "torch and NCCL."
        )
    return _check(
        f"gathered bytes equal checkpoint bytes ({count} tensors, {world.size} processes)",
        "0 differ",
    )


def _check_share(model: TrainingModel, world: World) -> Check:
    held_bytes, total_bytes = local_bytes(model.training)
    fair_bytes = fair_share(model.training, shards=world.shard_size)
    packed = model.packed_layers
    if packed:
        held_bytes += packed.device_bytes
        total_bytes += packed.device_bytes * world.shard_size
        fair_bytes += packed.fair_share()
    detail = (
        f"{held_bytes:,} of {total_bytes:,} bytes on rank {world.rank}, {world.shard_size} "
        "processes share a copy"
    )
    if packed and packed.host_bytes:
        detail += f"; {packed.host_bytes:,} bytes of {packed.layers_on_host} layers in host memory"
    return Check(
        name="every process holds its share of the parameters",
        passed=held_bytes <= fair_bytes * 1.02 + 65536,
        detail=detail,
    )


def _check_rows(store: TokenStore) -> Check:
    fewest = int(store.trained_tokens_per_row.min())
    if fewest == 0:
        raise UserError(
            "a training row has no trained token. Check data.loss_on, and tokenize again."
        )
    detail = f"fewest {fewest} of {store.seq_len}"
    return _check("every row has trained tokens", detail)


def check_family(training: CausalLMForTraining, store: TokenStore, world: World) -> Check:
    """Compare the logits with the family's own forward, which may compute more after its
    head, at several magnitudes of the last hidden states. Raises `UserError` if they differ, or if
    that forward fails. Collective."""
    ids = torch.from_numpy(store.input_ids[:1, :FAMILY_TOKENS].astype("int64")).to(world.device)
    positions = torch.arange(ids.shape[1], device=world.device)
    model: Any = training.peft_model.get_base_model()  # type: ignore[operator]
    grown = model.get_decoder().register_forward_hook(_growing)
    with forward_only(training):
        try:
            family_logits = training.family_logits(ids, positions[None])
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise UserError(
                f"{type(model).__name__}: the family's own forward fails on text "
                f"({said_by(error)}). Check that config.json belongs to the checkpoint, or choose "
                "another model.source."
            ) from error
        own_logits = training.logits(ids, positions[None], positions)
    grown.remove()
    by_token = (own_logits - family_logits).abs().amax(dim=1), family_logits.abs().amax(dim=1)
    worst = int((by_token[0] / by_token[1]).argmax())
    difference, largest = (float(x[worst]) for x in by_token)
    if not difference <= FAMILY_TOLERANCE * largest:
        raise UserError(
            f"{type(model).__name__} is not supported: its logits differ by {difference:.3g} "
            f"(of {largest:.3g}) from the matmul of hidden states and head, so the loss would be "
            "another model's. Choose another model.source."
        )
    return _check(
        "logits equal those of the model family's own forward",
        f"largest difference {difference:.2g} of {largest:.3g} over {len(positions)} tokens",
    )


def _growing(_: Any, __: Any, output: Any) -> Any:
    """Multiply a decoder's output states: for half of the tokens by 1, then by more and more."""
    hidden = output.last_hidden_state
    steps = torch.arange(hidden.shape[1], device=hidden.device) - hidden.shape[1] // 2 + 1
    factors = GROWN ** steps.clamp(min=0)
    output.last_hidden_state = hidden * factors[:, None].to(hidden.dtype)
    return output


def check_attention(training: CausalLMForTraining, store: TokenStore, world: World) -> Check:
    """Compare the hidden states of packed documents with each document alone, by the
    family's own eager attention: each layer's addition to the same input, and with recurrent layers
    also the sum of all additions. If no row has two documents, one document before a padding tail.
    The row is as long as any and has as many other documents, so its kernels serve the training,
    too; rows that processes share are cut off. Raises `UserError` if they differ. Collective."""
    seq_len = world.slice_tokens(store.seq_len)
    num_tokens = min(PACKED_TOKENS, seq_len)
    shares = PACKED_SHARES if _is_packed(store) else (1.0,)
    cuts = [round(num_tokens * share) for share in accumulate(shares, initial=0.0)]
    ids = torch.from_numpy(store.input_ids[:1, :seq_len].astype("int64")).to(world.device)
    others = np.linspace(num_tokens, seq_len, 1 + _documents(store)).round().astype(int)
    lengths = [stop - start for start, stop in pairwise([*cuts, *others.tolist()[1:]])]
    document_positions = [torch.arange(length, device=world.device)[None] for length in lengths]
    model: Any = training.peft_model.get_base_model()  # type: ignore[operator]
    layers = ComparedLayers(training, decoder_layers(model))

    def by_document(passing: Callable[[slice], AbstractContextManager[None]]) -> torch.Tensor:
        documents = []
        for (start, stop), position_ids in zip(pairwise(cuts), document_positions, strict=False):
            if stop > start:
                with passing(slice(start, stop)):
                    documents.append(
                        training.family_hidden_states(ids[:, start:stop], position_ids)
                    )
        return torch.cat(documents)

    with forward_only(training):
        with layers.noted(num_tokens):
            packed_states = training.hidden_states(ids, torch.cat(document_positions, dim=1))[
                :num_tokens
            ]
        at_end = _difference(packed_states, by_document(layers.compared))
        grown = 0.0
        if training.recurrent_layers:
            grown = _difference(packed_states, by_document(layers.routed))
    difference = max(layers.largest_difference(), at_end)
    if not (difference <= PACKED_TOLERANCE[packed_states.dtype] and grown <= GROWN_TOLERANCE):
        stock = model.config._attn_implementation in ("sdpa", "eager")
        raise UserError(
            f"packed documents of {type(model).__name__} have other hidden states than each by "
            f"itself has by the family's own attention: in one layer they differ by "
            f"{difference:.2g} of what it adds, and after all layers by "
            f"{max(at_end, grown):.2g} of their size, so another model would be trained. Set "
            f"model.attention to {FLEX if stock else 'sdpa or eager'}, or data.packing to false, "
            "or choose another model.source."
        )
    recurrent = training.recurrent_layers
    one_by_one = f"; {recurrent} recurrent layers take documents one by one" if recurrent else ""
    return _check(
        "packed documents have the hidden states of each by itself, by the family's attention",
        f"difference {difference:.2g} of what a layer adds at most, over {num_tokens} tokens"
        f"{one_by_one}",
    )


def check_recomputation(
    training: CausalLMForTraining, store: TokenStore, world: World
) -> list[Check]:
    """Compare gradients with and without recomputation of layers in backward, with the same random
    numbers. Return a check, or none without recomputation. Leaves no gradient, and restores the
    random numbers. Raises `UserError` if they differ. Collective."""
    model: Any = training.peft_model.get_base_model()  # type: ignore[operator]
    if not any(map(recomputes, decoder_layers(model))):
        return []
    ids = torch.from_numpy(store.input_ids[:1, :FAMILY_TOKENS].astype("int64")).to(world.device)
    recomputed = _drawn_gradients(training, ids, world)
    with nothing_recomputed(model):
        kept = _drawn_gradients(training, ids, world)
    squared_norms = torch.stack([(recomputed - kept).norm(), kept.norm()]).square().cpu()
    if world.size > 1:
        dist.all_reduce(squared_norms, group=world.io_group)
    difference = float((squared_norms[0] / squared_norms[1]).sqrt())
    if not difference <= RECOMPUTED_TOLERANCE:
        raise UserError(
            f"{type(model).__name__} has other gradients where its layers are recomputed in "
            f"backward: they differ by {difference:.2g} of their size, so another model would be "
            "trained. Set train.activation_checkpointing to false, or choose another model.source."
        )
    return [
        _check(
            "recomputed layers have the gradients of those that are not recomputed",
            f"difference {difference:.2g} of their size over {ids.shape[1]} tokens",
        )
    ]


def check_shared_prompts(
    training: CausalLMForTraining, store: TokenStore, world: World
) -> list[Check]:
    """Compare the states that predict the first row's answers with documents that have their own
    prompt; return a check, or none without shared prompts. Raises `UserError` if the median of
    tokens differs: rounding sends a few tokens to other experts. Collective."""
    row = np.arange(1)
    if not training.shares_prompts:
        return []
    rows = (None, int(shared_lengths(store, row)[0]))
    batches = [stored_batch(store, row, row_tokens=n).to(world.device) for n in rows]
    training.adapters.row_keys = None
    with forward_only(training):
        whole, shared = (training.trained_states(batch).float() for batch in batches)
    by_token = (shared - whole).norm(dim=1) / whole.norm(dim=1)
    difference = float(by_token.median())
    if not difference <= GROWN_TOLERANCE:
        raise UserError(
            f"answers that share their prompt have other hidden states than with a prompt of their "
            f"own: they differ by {difference:.2g} of their size, so another model would be "
            "trained. Set preferences.shared_prompt to false."
        )
    return [
        _check(
            "answers that share their prompt have the hidden states of whole documents",
            f"difference {difference:.2g} of their size over {len(by_token)} tokens; "
            f"{batches[1].input_ids.shape[1]} of {batches[0].input_ids.shape[1]} tokens are left",
        )
    ]


def check_shared_rows(
    training: CausalLMForTraining, store: TokenStore, world: World
) -> list[Check]:
    """Compare the states of two packed documents whose row processes share with those of a process
    with the whole row; return a check, or none. Raises `UserError` if the median of tokens differs.
    Collective."""
    if world.context is None:
        return []
    ids = store.input_ids[:1, :PACKED_TOKENS].astype("int64")
    first = ids.shape[1] // 3
    positions = np.concatenate([np.arange(first), np.arange(ids.shape[1] - first)])[None]
    batch = make_batch(ids, positions, positions > 0, device=torch.device("cpu"))
    part = cut_rows(batch, world.context)
    assert part.cut is not None
    own = torch.isin(batch.positions, part.cut.positions).to(world.device)
    with forward_only(training):
        whole, cut = (training.trained_states(x.to(world.device)).float() for x in (batch, part))
    by_token = (cut - whole[own]).norm(dim=1) / whole[own].norm(dim=1)
    difference = max(world.gathered(float(by_token.median()) if len(by_token) else 0.0))
    if not difference <= GROWN_TOLERANCE:
        raise UserError(
            "rows whose tokens processes share have other hidden states than whole rows: they "
            f"differ by {difference:.2g} of their size, so another model would be trained. Set "
            "hardware.context_parallel to 1."
        )
    return [
        _check(
            "rows that processes share have the hidden states of whole rows",
            f"difference {difference:.2g} of their size over {ids.shape[1]} tokens",
        )
    ]


def _drawn_gradients(
    training: CausalLMForTraining, ids: torch.Tensor, world: World
) -> torch.Tensor:
    """Return this process's part of all gradients (n,) fp32, of a random projection of the hidden
    states of `ids` (1, tokens), by the family's own attention, without compilation."""
    model: Any = training.peft_model.get_base_model()  # type: ignore[operator]
    training.train()
    if training.router_balance is not None:
        training.router_balance.training = False  # no step has begun
    training.adapters.row_keys = torch.zeros(1, dtype=torch.int64, device=world.device)
    position_ids = torch.arange(ids.shape[1], device=world.device)[None]
    devices = [] if world.device.type == "cpu" else [world.device]
    with torch.random.fork_rng(devices), attending_by_reference(model.get_decoder().config):
        torch.manual_seed(0)
        hidden = training.hidden_states(ids, position_ids)
        hidden.backward(torch.randn_like(hidden))
    training.after_backward()
    gradients = [
        local(param.grad).flatten().float()
        for param in training.parameters()
        if param.grad is not None
    ]
    training.zero_grad()
    training.eval()
    return torch.cat(gradients)


def _difference(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the difference of hidden states, as a share of their size (root mean squares)."""
    difference, reference = values.float() - reference.float(), reference.float()
    return float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


def _documents(store: TokenStore) -> int:
    """Return the mean documents of a row."""
    return round(float((store.position_ids[:ROWS_LOOKED_AT] == 0).sum(axis=1).mean()))


def _is_packed(store: TokenStore) -> bool:
    """Whether a row has trained tokens after its first document."""
    document = (store.position_ids[:ROWS_LOOKED_AT] == 0).cumsum(axis=1)
    return bool((document[store.loss_mask[:ROWS_LOOKED_AT]] > 1).any())


def check_precision(
    training: CausalLMForTraining, store: TokenStore, train: TrainConfig, world: World
) -> list[Check]:
    """Compare the base's loss with matmuls in 8 bits and without; return the report's check, none
    for a run without. Collective. With `auto` a rise above the bound switches 8 bits off; else it
    raises `UserError`."""
    forward, backward = training.matmul_precision.by_pass
    if not forward and not backward:
        return []
    if not forward:
        detail = f"only gradients are in {FLOAT8}"
        return [_check("matmuls in 8 bits are in backward alone", detail)]
    training.eval()
    plain, rounded = (
        _loss(training, store, world, precision)
        for precision in (nullcontext(), training.matmul_precision.in_eight_bits())
    )
    return [_judged(training, train, plain=plain, rounded=rounded)]


def _judged(
    training: CausalLMForTraining, train: TrainConfig, *, plain: float, rounded: float
) -> Check:
    """Return the check of both losses, nats per trained token, or end the run."""
    bound = train.max_matmul_loss_rise
    detail = (
        f"{plain:.4f} nats per token in the compute dtype, {rounded:.4f} in {FLOAT8}; allowed "
        f"is a rise of {bound:g}"
    )
    if rounded - plain <= bound:
        logger.info("matmuls of frozen weights in %s: %s", FLOAT8, detail)
        return _check("the base's loss in 8 bits is that of the compute dtype", detail)
    if train.matmul_dtype != "auto":
        change = (
            f"Set it to {COMPUTE_DTYPE}, set train.matmul_passes to backward, or raise "
            "train.max_matmul_loss_rise"
        )
        raise setting_error(
            "train.matmul_dtype", train.matmul_dtype, f"the base has {detail}", change
        )
    training.multiply_in_(COMPUTE_DTYPE, train.matmul_passes)
    logger.warning("train.matmul_dtype = auto: no matmuls in 8 bits, since the base has %s", detail)
    return _check("matmuls in 8 bits are off where they cost the base more than allowed", detail)


def _loss(
    training: CausalLMForTraining,
    store: TokenStore,
    world: World,
    precision: AbstractContextManager[None],
) -> float:
    """Return the mean loss of a trained token of the first rows, divided among processes, for any
    objective. Collective."""
    groups = world.row_groups
    count = math.ceil(TOKENS / store.seq_len / groups)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with training.with_objective(NEXT_TOKEN), forward_only(training), precision:
        for number in range(world.row_group, count * groups, groups):
            row = np.array([number % store.num_rows])
            batch = cut_rows(stored_batch(store, row), world.context)
            total[0] += training(batch.to(world.device))
            total[1] += NEXT_TOKEN.step_sizes(store, row)[0] * groups / world.size
            world.moved()
    dist.all_reduce(total)
    return float(total[0] / total[1])

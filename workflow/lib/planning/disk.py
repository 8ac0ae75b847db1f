"""Bytes on disk of what a run leaves behind, from shapes alone."""

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.model_sizes import adapter_elements, packed_bytes, trainable_parameters
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.optimizers import OPTIMIZERS
from workflow.lib.step_plan.plan import StepPlan


def disk_bytes(
    shape: ModelShape,
    plan: StepPlan,
    tokens: TokenCounts,
    *,
    keep_checkpoints: int,
    keep_best: bool,
) -> dict[str, int]:
    """Return the bytes of every artifact of a run. Checkpoints (fp32 adapter, whole modules,
    optimizer's states): one more than are kept, as the new one comes before the oldest goes. The
    adapter lies there twice, with the best ones: one for every checkpoint, and the newest."""
    base = shape.total(lambda layer: packed_bytes(layer.linears, plan))
    base += packed_bytes(shape.other_linears, plan)
    trained, of_adapter = trainable_parameters(shape, plan), adapter_elements(shape, plan)
    adapter, kind = 4 * trained, OPTIMIZERS[plan.optimizer]
    states = sum(kind.sizes(of_adapter) + kind.sizes(trained - of_adapter, matrix=False))
    packed_tokens = tokens.packed_rows * tokens.seq_len
    return {
        "tokens": packed_tokens * (4 + 1 + 4) + tokens.heldout_tokens * (4 + 1),
        "base": base + shape.source_bytes * shape.plain_weights,
        "checkpoints": (adapter + states) * (keep_checkpoints + 1),
        "adapter": (2 + (keep_checkpoints + 1 if keep_best else 0)) * adapter,
    }

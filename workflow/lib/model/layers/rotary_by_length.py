"""Documents that a stock model can batch without a change to their rotary frequencies.

Transformers (5.23) rotates a batch by its longest row. LongRoPE uses one of two sets, dynamic NTK
scaling one for each length beyond max_position_embeddings, and keeps it for later rows."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig

from workflow.lib.model.layers.rotary_by_document import DYNAMIC, LONGROPE, length_limit

Item = TypeVar("Item")
Result = TypeVar("Result")


def rotated_alike(config: PretrainedConfig, tokens: int, *, new_tokens: int = 0) -> tuple[int, ...]:
    """Return a key that documents of one batch must share, beside padding. tokens: of the document;
    new_tokens: bound of generated tokens. Where frequencies change with each token, only equal
    lengths have equal keys."""
    config = config.get_text_config()
    alike = []
    for kind, limit in _limits(config):
        if tokens + new_tokens <= limit:
            alike.append(0)
        else:
            alike.append(-1 if kind == LONGROPE and tokens > limit else tokens)
    return tuple(alike)


def changes_with_length(config: PretrainedConfig) -> bool:
    """Return whether rotary frequencies depend on the longest row of a batch."""
    return bool(_limits(config.get_text_config()))


def _limits(config: Any) -> list[tuple[str, int]]:
    """Return kinds and limits of the rotary embeddings whose frequencies change."""
    parameters = getattr(config, "rope_parameters", None) or {}
    several = [x for x in parameters.values() if isinstance(x, dict)] or [parameters]
    kinds = [(str(x.get("rope_type")), x) for x in several]
    limits = [(kind, length_limit(kind, x, config)) for kind, x in kinds]
    return [(kind, limit) for kind, limit in limits if limit is not None]


def in_groups(
    items: Sequence[Item],
    alike: Callable[[Item], object],
    compute: Callable[[list[Item]], list[Result]],
) -> list[Result]:
    """Return the results of `compute` in the order of items; it gets items with equal `alike`."""
    groups: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(alike(item), []).append(number)
    results: dict[int, Result] = {}
    for numbers in groups.values():
        made = compute([items[number] for number in numbers])
        results |= dict(zip(numbers, made, strict=True))
    return [results[number] for number in range(len(items))]


def rotate_by_call_alone_(model: nn.Module) -> None:
    """Reset dynamic NTK, which keeps longer rows' frequencies, before each call of a model."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_type = kinds if isinstance(kinds, dict) else {"": kinds}
        for layer_type, kind in by_type.items():
            if kind == DYNAMIC:
                prefix = f"{layer_type}_" if layer_type else ""
                module.register_forward_pre_hook(_Forgotten(prefix))


class _Forgotten:
    """Restores the state of a rotary embedding before its first call."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, rotary: Any, _: object) -> None:
        original = getattr(rotary, f"{self._prefix}original_inv_freq")
        rotary.register_buffer(f"{self._prefix}inv_freq", original, persistent=False)
        setattr(rotary, f"{self._prefix}max_seq_len_cached", rotary.original_max_seq_len)

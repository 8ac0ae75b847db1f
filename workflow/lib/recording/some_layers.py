"""Which of a model's decoder layers are recorded for all of them, and a model of these alone.

What a layer asks of the allocator depends on its kind and its neighbours. So a stretch in the
middle is cut out such that every layer, with its neighbours, has one like it among the others."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.host_embedding import other_tables

EDGE = 2  # layers at both ends that stand for themselves alone
TYPES = (bool, int, str, type(None))


def layer_kinds(model: PreTrainedModel, choice: LayerChoice) -> list[int]:
    """Return the number of each layer's kind, which has the same modules and options; no two are
    alike where layers take something from a certain other one."""
    taken = (choice.recomputed, choice.activations_on_host, choice.weights_on_host)
    types = getattr(model.config.get_text_config(), "layer_types", None)
    connected = _connected(model)
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(
            (
                _modules(layer),
                types[number] if types else None,
                number if connected else None,
                *(number in layers for layers in taken),
            ),
            len(numbers),
        )
        for number, layer in enumerate(decoder_layers(model))
    ]


def _connected(model: PreTrainedModel) -> bool:
    """Whether layers share keys or parts of a table (Gemma 3n, 4): none can be taken out then."""
    shares = any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
    return shares or bool(other_tables(model))


def _modules(layer: nn.Module) -> Hashable:
    return tuple(
        (
            path,
            type(module).__name__,
            tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, TYPES) and name != "layer_idx"
            ),
        )
        for path, module in layer.named_modules()
    )


def representatives(kinds: Sequence[Hashable], *, reach: int) -> list[int]:
    """Return the fewest layers, in their order, that stand for all, and for two neighbours that are
    alike; all layers where no fewer do. reach: how far layers know of each other."""
    total = len(kinds)
    edge = max(EDGE, reach)
    for count in range(2 * edge + 2, total):
        for cut in range(edge + 1, count - edge + 1):
            left = [*range(cut), *range(cut + total - count, total)]
            if _stand_for_all(kinds, left, reach=reach):
                return left
    return [*range(total)]


def _stand_for_all(kinds: Sequence[Hashable], left: Sequence[int], *, reach: int) -> bool:
    known = stand_ins([kinds[number] for number in left], reach=reach)
    return all(
        surroundings(kinds, number, reach=reach) in known
        for number in range(EDGE, len(kinds) - EDGE)
    ) and any(len(alike) > 1 for alike in known.values())


def stand_ins(kinds: Sequence[Hashable], *, reach: int) -> dict[Hashable, list[int]]:
    """Return the layers between the edges by their surroundings."""
    found: dict[Hashable, list[int]] = {}
    for number in range(EDGE, len(kinds) - EDGE):
        found.setdefault(surroundings(kinds, number, reach=reach), []).append(number)
    return found


def surroundings(kinds: Sequence[Hashable], number: int, *, reach: int) -> Hashable:
    """Return a layer's kind and those of its neighbours; beyond the ends there is nothing."""
    places = range(number - reach, number + reach + 1)
    return tuple(kinds[x] if 0 <= x < len(kinds) else None for x in places)


def keep_layers_(model: PreTrainedModel, numbers: Sequence[int]) -> None:
    """Take all other decoder layers out of a meta-device model."""
    layers = decoder_layers(model)
    wanted = [layers[number] for number in numbers]
    for place, layer in enumerate(wanted):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", place)  # noqa: B010
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and child[0] is layers[0]:
                setattr(module, name, nn.ModuleList(wanted))
    _cut_config_(model.config.get_text_config(), numbers, total=len(layers))


def _cut_config_(config: Any, numbers: Sequence[int], *, total: int) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(config, name, [value[number] for number in numbers])
    config.num_hidden_layers = len(numbers)

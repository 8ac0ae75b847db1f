"""What decoder layers hand on beside hidden states.

A layer may return more than hidden states (tokens that an indexer chose, states of its router), and
put tensors into a mapping that all layers get (keys and values that later layers attend to)."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workflow.lib.system.errors import UserError

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer's forward, by place and by name."""
Shared = dict[str, dict[str, tuple[torch.Tensor, ...]]]
"""Tensors in mappings that layers share, by argument and key."""


@dataclass(frozen=True)
class Beside:
    """What goes into a layer beside hidden states, of the layers before it, in host memory."""

    others: tuple[torch.Tensor | None, ...] | None = None
    """What the layer before returns behind hidden states; None: it returns these alone."""
    shared: Shared = field(default_factory=dict)

    def output(self, hidden: torch.Tensor) -> Any:
        """Return what the layer before returns, with these hidden states."""
        if self.others is None:
            return hidden
        return hidden, *(None if x is None else x.to(hidden.device) for x in self.others)

    def put_into(self, given: Given) -> None:
        """Let a layer's arguments have what the layers before it share."""
        device = next(tensors_in(given)).device
        for argument, mapping in _mappings(given):
            for key, tensors in self.shared.get(argument, {}).items():
                mapping[key] = tuple(x.to(device) for x in tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if self.others is not None:
            found["returned"] = torch.tensor(len(self.others))
            found |= {f"other/{n}": x for n, x in enumerate(self.others) if x is not None}
        for argument, mapping in self.shared.items():
            for key, parts in mapping.items():
                found |= {f"shared/{argument}/{key}/{n}": x for n, x in enumerate(parts)}
        return found


def beside_of(tensors: Mapping[str, torch.Tensor]) -> Beside:
    others, shared = None, Shared()
    if "returned" in tensors:
        others = tuple(tensors.get(f"other/{n}") for n in range(int(tensors["returned"])))
    for name in sorted(tensors):  # parts in order: a layer shares fewer than ten
        if name.startswith("shared/"):
            _, argument, key, _ = name.split("/")
            kept = shared.setdefault(argument, {})
            kept[key] = (*kept.get(key, ()), tensors[name])
    return Beside(others, shared)


class Watched:
    """A layer's forward, and what it hands on beside hidden states."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._before = {name: dict(mapping) for name, mapping in _mappings(given)}

    def handed_on(self, output: Any, before: Beside, next_given: Given | None) -> Beside:
        """Return what goes beside hidden states into the layer behind, which gets `next_given`
        (None: no layer), on the host. before: what went into this layer."""
        shared = {name: dict(mapping) for name, mapping in before.shared.items()}
        for name, mapping in _mappings(self._given):
            for key, value in mapping.items():
                if value is not self._before[name].get(key):
                    parts = value if isinstance(value, tuple) else (value,)
                    shared.setdefault(name, {})[key] = tuple(x.cpu() for x in parts)
        if not isinstance(output, tuple):
            return Beside(None, shared)
        wanted = {id(x) for x in tensors_in(next_given)}
        return Beside(tuple(x.cpu() if id(x) in wanted else None for x in output[1:]), shared)


def refuse_unlike(layer: str, given: Given, followed: Given) -> None:
    """Raise `UserError` if a layer is given other tensors (`followed`) than it is to get."""
    pairs = zip(tensors_in(given), tensors_in(followed), strict=True)
    if not all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs):
        raise UserError(
            f"{layer} is given more of the layers before it than what the last of them returns, so "
            "its model cannot be run layer by layer. Set quantize.method to absmax, and leave "
            "original out of evaluate.subjects if it is larger than memory"
        )


def hidden_in(given: Given) -> torch.Tensor:
    positional, named = given
    states: torch.Tensor = positional[0] if positional else named["hidden_states"]
    return states


def with_hidden(given: Given, hidden: torch.Tensor | None) -> Given:
    positional, named = given
    if positional:
        return (hidden, *positional[1:]), named
    return positional, named | {"hidden_states": hidden}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from tensors_in(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def _mappings(given: Given) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield name and value of arguments that a layer can change."""
    positional, named = given
    for name, value in [*((str(n), x) for n, x in enumerate(positional)), *named.items()]:
        if isinstance(value, MutableMapping):
            yield name, value

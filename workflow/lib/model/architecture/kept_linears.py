"""Linears and stacks of experts that stay in 16 bits in the frozen base (`quantize.keep`).

An entry is a regular expression for consecutive parts of a path: a name (`q_proj`), a kind
(`self_attn`), a layer (`layers.0`), or a pattern of these (`layers.(0|31).mlp`). Imports no torch,
so preflight and quantization decide alike."""

import re
from collections.abc import Iterable, Sequence

from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.limits import BoundedWork
from workflow.lib.system.number_formats import listed_names

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def kept_linears(patterns: Sequence[str], paths: Iterable[str]) -> frozenset[str]:
    """Return the paths that any entry of `keep` matches."""
    matches = [_expression(pattern) for pattern in patterns]
    with BoundedWork(
        "quantize.keep: a regular expression {excess} to match the model's layers. Write it "
        "without repetitions within repetitions, as (a+)+."
    ):
        return frozenset(path for path in paths if any(x.fullmatch(path) for x in matches))


def checked_linears(settings: QuantizeConfig, paths: Sequence[str]) -> frozenset[str]:
    """Return the paths in 16 bits by the settings; raises `UserError` for an entry of `keep` that
    keeps nothing."""
    for pattern in settings.patterns:
        if not kept_linears([pattern], paths):
            names = listed_names(sorted({path.rpartition(".")[2] for path in paths}))
            raise setting_error(
                "quantize.keep",
                pattern,
                f"no linear of the model has this in its path ({paths[0]}, for example)",
                f"Name one of {names}, a module around it, or layers by number (layers.0)",
            )
    return kept_linears(settings.kept, paths)


def exact_patterns(paths: Iterable[str]) -> tuple[str, ...]:
    """Return expressions that match these paths alone, one for all layers of a name."""
    numbers: dict[str, list[int]] = {}
    for path in paths:
        layer = _LAYER.search(path)
        # With %s for the number of the layer: no path has one.
        pattern = re.escape(path)
        if layer is not None:
            pattern = f"{re.escape(path[: layer.start()])}%s{re.escape(path[layer.end() :])}"
        numbers.setdefault(pattern, []).extend([] if layer is None else [int(layer.group())])
    return tuple(
        pattern.replace("%s", f"({'|'.join(map(str, sorted(layers)))})")
        for pattern, layers in sorted(numbers.items())
    )


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?(?:{pattern})(\..*)?")

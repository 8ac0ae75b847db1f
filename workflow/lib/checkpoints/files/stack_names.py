"""Names of adapters on stacks of experts: in training, and in PEFT's files.

In training a stack is a module, so its adapter has the stack's own path
(`model.layers.0.mlp.experts.gate_up_proj.lora_A.weight`). PEFT (0.21, `ParamWrapper`) wraps the
module of the experts once for each adapted parameter, in the module's order. Only the depth of its
wrapper identifies a parameter: the last one has the outermost, `...mlp.experts`, the one before it
`...mlp.experts.base_layer`.

Transformers 4 had a module for each projection of an expert. `experts.3.gate_proj` and
`experts.3.up_proj` of rank r are together `experts.gate_up_proj` of rank 2 r, A on A and B block by
block, with twice the alpha (PEFT 0.21, `_convert_peft_config_moe`)."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

PREFIX = "base_model.model."  # PEFT's, of every name
PROJECTION = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>\w+)\.lora_A\.weight")
# Projections of an expert, in their order in a stack.
STACKS = {
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("w1", "w3"): "gate_up_proj",
    ("down_proj",): "down_proj",
    ("w2",): "down_proj",
}


class StackNames:
    """Names of an adapter's tensors in training and in PEFT; stacks: the adapted ones, in order."""

    def __init__(self, stacks: Iterable[str]) -> None:
        wrappers = _wrappers(stacks)
        self._exported = {f"{PREFIX}{path}": f"{PREFIX}{new}" for path, new in wrappers.items()}
        self._trained = {new: path for path, new in self._exported.items()}

    def exported(self, name: str) -> str:
        return _renamed(name, self._exported)

    def trained(self, name: str) -> str:
        return _renamed(name, self._trained)


def _wrappers(stacks: Iterable[str]) -> dict[str, str]:
    modules: dict[str, list[str]] = {}
    for path in stacks:
        modules.setdefault(path.rpartition(".")[0], []).append(path)
    return {
        path: module + ".base_layer" * depth
        for module, paths in modules.items()
        for depth, path in enumerate(reversed(paths))
    }


def _renamed(name: str, paths: Mapping[str, str]) -> str:
    path, mark, suffix = name.partition(".lora_")
    return paths.get(path, path) + mark + suffix


def stacked(names: Collection[str]) -> dict[str, list[list[str]]]:
    """Return the stacks whose experts have adapters of their own in a file, by path: of each expert
    the paths of its projections."""
    experts: dict[str, set[int]] = {}
    for match in filter(None, map(PROJECTION.fullmatch, names)):
        experts.setdefault(match["experts"], set()).add(int(match["number"]))
    return {
        f"{path}.{stack}": [[f"{path}.{n}.{part}" for part in parts] for n in sorted(numbers)]
        for path, numbers in experts.items()
        for parts, stack in STACKS.items()
        if all(f"{path}.{min(numbers)}.{part}.lora_A.weight" in names for part in parts)
    }


def stack_settings(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return an `adapter_config.json` whose targets are stacks, given the tensors' names."""
    stacks = stacked(names)
    if not stacks:
        return dict(config)
    paths = {name.partition(".lora_A")[0] for name in names if ".lora_A" in name}
    outside = {path for path in paths if ".experts." not in path}
    targets = config.get("target_modules") or []
    if isinstance(targets, str):
        targets = {path.rpartition(".")[2] for path in outside}
    kept = {name for name in targets if any(f".{path}".endswith(f".{name}") for path in outside)}
    counts = {path.rpartition(".")[2]: len(experts[0]) for path, experts in stacks.items()}
    joined = {rf"experts\.{name}": count for name, count in counts.items() if count > 1}
    power = 0.5 if config.get("use_rslora") else 1.0  # keeps the scale at the larger rank
    ranks = {name: count * config["r"] for name, count in joined.items()}
    alphas = {name: count**power * config["lora_alpha"] for name, count in joined.items()}
    return dict(config) | {
        "target_modules": sorted(kept | {f"experts.{name}" for name in counts}),
        "rank_pattern": ranks | (config.get("rank_pattern") or {}),
        "alpha_pattern": alphas | (config.get("alpha_pattern") or {}),
    }

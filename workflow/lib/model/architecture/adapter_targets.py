"""Which linears of a model get an adapter, and its rank: PEFT's rules, applied to names alone.

PEFT warns or says nothing where a pattern matches nothing; here that is an error. Imports no torch,
so preflight and training decide alike. Rules read from PEFT 0.21, `check_target_module_exists` and
`get_pattern_key`."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.limits import BoundedWork

# Names in checkpoints of the weights of one expert; stacks in the model have other names.
EXPERT_WORDS = frozenset({"experts", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
NEGATIVE_LOOKAROUND = re.compile(r"\(\?<?!(?:[^()]|\([^()]*\))*\)")


def adapter_ranks(
    lora: LoraSettings, *, linears: Iterable[str], stacks: Collection[str] = ()
) -> dict[str, int]:
    """Return the rank of every adapted linear by path, in the order of `linears`. stacks: weights
    of experts that get an adapter. Raises `UserError` if a name or pattern matches none, takes too
    long, or sets an option that experts cannot have."""
    with BoundedWork(
        "lora.target_modules, rank_pattern or alpha_pattern: a regular expression {excess} to "
        "match the model's layers. Write it without repetitions within repetitions, as (a+)+."
    ):
        ranks = _adapter_ranks(lora, list(linears), [*stacks])
    _check_experts(lora, [path for path in stacks if path in ranks])
    return ranks


def _check_experts(lora: LoraSettings, stacks: list[str]) -> None:
    """Raise `UserError` for adapters of experts that PEFT lacks, or of half an expert."""
    if not stacks:
        return
    experts, _, name = stacks[0].rpartition(".")
    for setting, value in (("dropout", lora.dropout), ("use_dora", lora.use_dora)):
        if value:
            raise setting_error(
                f"lora.{setting}",
                value,
                f"the experts of this model ({experts}) get adapters, and PEFT has no "
                f"{'dropout' if setting == 'dropout' else 'DoRA'} for the weights of experts",
                "Remove it, or name the other linears alone in lora.target_modules",
            )
    targets = lora.target_modules
    if {"gate_up_proj", "up_proj"} & {path.rpartition(".")[2] for path in stacks}:
        return  # gate_up_proj of gated experts, up_proj of Nemotron H
    parts = _words(targets) if isinstance(targets, str) else targets
    if {"gate_proj", "up_proj"} & {part.rpartition(".")[2] for part in parts}:
        raise setting_error(
            "lora.target_modules",
            targets if isinstance(targets, str) else list(targets),
            f"{name} means the experts of this model, too, whose gate_proj and up_proj are one, "
            f"{experts}.gate_up_proj: half of each expert would be adapted",
            "Name gate_up_proj, too, or shared_experts.down_proj instead of down_proj",
        )


def _adapter_ranks(lora: LoraSettings, paths: list[str], stacks: list[str]) -> dict[str, int]:
    chosen = [path for path in paths if _is_target(lora.target_modules, path)]
    try:
        _check_targets(lora.target_modules, paths=paths, chosen=chosen)
        _check_expression(lora.target_modules, chosen=chosen, stacks=stacks)
        for setting in ("rank_pattern", "alpha_pattern"):
            _check_patterns(setting, getattr(lora, setting), chosen=chosen)
    except UserError as error:
        raise UserError(f"{error}{_naming_of_experts(stacks)}") from None
    return {path: int(by_pattern(lora.rank_pattern, path, lora.r)) for path in chosen}


def _naming_of_experts(stacks: list[str]) -> str:
    """Return the names of expert weights for a message; empty for a dense model."""
    if not stacks:
        return ""
    names = " and ".join(dict.fromkeys(".".join(path.split(".")[-2:]) for path in stacks))
    return (
        f" In this mixture {names} are all experts of a layer, which share rank and alpha; routers "
        "are trained whole, by lora.modules_to_save."
    )


def adapter_scale(lora: Mapping[str, Any], path: str) -> float:
    """Return the factor of B A at `path`: alpha / r, or alpha / sqrt(r) (rsLoRA); lora: PEFT's."""
    patterns = {key: lora.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    assert all(isinstance(pattern, Mapping) for pattern in patterns.values())
    rank = by_pattern(patterns["rank_pattern"], path, lora["r"])
    alpha = by_pattern(patterns["alpha_pattern"], path, lora["lora_alpha"])
    return float(alpha / (rank**0.5 if lora["use_rslora"] else rank))


@dataclass(frozen=True)
class WholeModules:
    """The modules of a model that can be trained whole, by path."""

    embedding: str
    head: str
    tied: bool  # embedding and head share one table
    routers: tuple[str, ...] = ()  # those of a mixture (`model.layers.3.mlp.gate`)

    @property
    def paths(self) -> tuple[str, ...]:
        return self.embedding, self.head, *self.routers

    @property
    def names(self) -> list[str]:
        """Their names (of a router the last two parts of its path), each once."""
        tables = [path.rpartition(".")[2] for path in (self.head, self.embedding)]
        routers = [".".join(path.split(".")[-2:]) for path in self.routers]
        return list(dict.fromkeys(tables + routers))


def modules_to_save(
    lora: LoraSettings, offered: WholeModules, *, others: Iterable[str] = ()
) -> set[str]:
    """Return the paths of the modules that are trained whole. Raises `UserError` for one that is
    not offered, a name that PEFT would match with one of `others`, or a tied table."""
    chosen = set()
    for name in lora.modules_to_save:
        matches = [path for path in offered.paths if _is_target((name,), path)]
        if not matches:
            raise _not_offered(name, offered)
        chosen |= {*matches}
    _refuse_namesakes(lora.modules_to_save, chosen, [*offered.paths, *others])
    if offered.tied and chosen & {offered.embedding, offered.head}:
        raise setting_error(
            "lora.modules_to_save",
            list(lora.modules_to_save),
            "this model ties its output head to its input embedding: PEFT would train and export "
            "two tables that drift apart",
            "Remove it, or choose a model.source with a head of its own",
        )
    return chosen


def _not_offered(name: str, offered: WholeModules) -> UserError:
    *first, last = offered.names
    routers = ", and the routers of a mixture," if offered.routers else ""
    return setting_error(
        "lora.modules_to_save",
        name,
        f"only the output head and the input embedding{routers} can be trained whole; in this "
        f"model they are {', '.join(first)} and {last}",
        f"Name {', '.join(first)} or {last}; linear layers get adapters by lora.target_modules",
    )


def _refuse_namesakes(names: Iterable[str], chosen: set[str], paths: Iterable[str]) -> None:
    """Raise `UserError` for a name with which PEFT would train other modules too."""
    for name in names:
        others = [path for path in paths if path.endswith(name) and path not in chosen]
        if others:
            whole = sorted({".".join(path.split(".")[-2:]) for path in chosen})
            raise setting_error(
                "lora.modules_to_save",
                name,
                f"{others[0]} ends so too, and PEFT would take it for one of them",
                f"Name more of the path: {' or '.join(whole)}",
            )


def _is_target(targets: tuple[str, ...] | str, path: str) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(path == target or path.endswith(f".{target}") for target in targets)


def by_pattern(patterns: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of the first pattern that matches the end of `path`, or the default."""
    return next((value for key, value in patterns.items() if _ends_with(key, path)), default)


def _ends_with(pattern: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _check_targets(targets: tuple[str, ...] | str, *, paths: list[str], chosen: list[str]) -> None:
    names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    if isinstance(targets, str):
        if not chosen:
            raise setting_error(
                "lora.target_modules",
                targets,
                "as a regular expression it matches the whole path of no linear layer; a path is "
                f"{paths[0]}",
                f"Mend it, or give a list of names ({names}), or all-linear",
            )
        return
    for target in sorted(targets):
        if not any(_is_target((target,), path) for path in chosen):
            raise setting_error(
                "lora.target_modules",
                target,
                f"no linear layer of the model has this name; it has {names}",
                "Name some of these, or all-linear",
            )


def _check_expression(
    targets: tuple[str, ...] | str, *, chosen: list[str], stacks: list[str]
) -> None:
    """Raise `UserError` if a regular expression names a weight of experts but matches no expert.
    One of other linears alone is right: it trains no expert."""
    if not isinstance(targets, str) or not stacks or {*stacks} & {*chosen}:
        return
    matched = {name for path in chosen for name in path.split(".")}
    expert_words = EXPERT_WORDS.union(*(path.split(".") for path in stacks))
    missed = sorted(_words(targets) & expert_words - matched)
    if missed:
        raise setting_error(
            "lora.target_modules",
            targets,
            f"as a regular expression it names {missed[0]}, but matches the whole path of no "
            f"expert; a path is {stacks[0]}",
            "Mend it, or take that name out to train no expert",
        )


def _words(expression: str) -> set[str]:
    """Return the names in a regular expression, without excluded ones and classes."""
    wanted = NEGATIVE_LOOKAROUND.sub(" ", expression)
    return {*re.findall(r"[A-Za-z]\w*", re.sub(r"\\[A-Za-z]", " ", wanted))}


def _check_patterns(setting: str, patterns: Mapping[str, float], *, chosen: list[str]) -> None:
    for pattern in patterns:
        if not any(_ends_with(pattern, path) for path in chosen):
            raise UserError(
                f"lora.{setting}: {pattern!r} is the end of no adapted layer's path, such as "
                f"{chosen[0]}. Correct or remove it."
            )

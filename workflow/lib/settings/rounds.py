"""Settings of rounds: answers that a model samples, their rewards, and the runs of `rounds: N`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from workflow.lib.settings.overrides import merge
from workflow.lib.settings.section_base import Affects, Name, Section
from workflow.lib.system.errors import setting_error

MOST_ROUNDS = 1000
PLANNED = Affects(stages=("sample_answers", "preflight_run"))
PACKED = Affects(stages=("pack_answers",))


class AnswersConfig(Section):
    """Answers that a run samples before its training, if `rewards.functions` names any: of its base
    with the adapter of `train.start_from`."""

    affects: ClassVar = Affects("result", stages=("sample_answers",))

    sampler: Literal["engine", "vllm"] = "engine"
    """engine: on the base of the training; vllm (`make serving`): the adapter on the original."""
    per_prompt: Annotated[int, PLANNED] = Field(8, ge=2, le=1024)
    """Answers to a prompt."""
    prompts_per_round: Annotated[int, PLANNED] = Field(64, ge=0, le=65_536)
    """Prompts of a round, at least 1: the next training rows, in an order by `seed`."""
    heldout_prompts: int = Field(32, ge=1, le=65_536)
    """Held-out prompts, the same before every round and after the last. Their rewards compare
    rounds; no run trains on them."""
    max_new_tokens: Annotated[int, PLANNED] = Field(256, ge=1, le=131_072)
    """Longest answer, tokens. A prompt that leaves less room in `data.seq_len` is left out."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """The logits are divided by it."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample from the fewest tokens that have this probability together."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, beside the tokens that end trained turns."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of prompts and answers. Batches and restarts do not change an answer."""
    round: int = Field(1, ge=1, le=MOST_ROUNDS + 1)
    """Number of the round, which decides its prompts; `rounds` sets it."""


class RewardFunction(Section):
    """A reward: a number for an answer."""

    function: str = Field(min_length=1, max_length=1024)
    """last_number, boxed, regex, json, length, or a function of your own: `path.py:name`, called
    with prompt, answer, row and the options."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of the number in the sum."""
    options: dict[str, JsonValue] = Field({})
    """Further arguments of the function."""

    @property
    def file(self) -> str | None:
        """The user's file; None for a shipped function."""
        path, colon, _ = self.function.rpartition(":")
        return path if colon else None

    @model_validator(mode="after")
    def _is_shipped_or_in_a_file(self) -> "RewardFunction":
        path, colon, name = self.function.rpartition(":")
        is_own = bool(colon) and path.endswith(".py") and name.isidentifier()
        if not is_own and self.function not in SHIPPED:
            raise ValueError(
                f"function = {self.function}: no such function is shipped. Name one of "
                f"{', '.join(SHIPPED)}, or your own as path.py:name"
            )
        return self


SHIPPED = ("last_number", "boxed", "regex", "json", "length")


class RewardsConfig(Section):
    """Rewards of sampled answers, and what is trained: the best answers (sft), the best against the
    worst (pairs), or all by their advantages (grpo)."""

    affects: ClassVar = Affects("result", stages=("score_answers",))

    functions: dict[Name, RewardFunction] = Field({})
    """Rewards by name; an answer has their weighted sum. {} = the run trains on its rows."""
    seconds: float = Field(10.0, gt=0.0, le=86_400.0)
    """Longest time of one call of a function. An answer whose function takes longer, fails or
    returns no number has no reward: it is counted, and not trained."""
    memory_gib: float = Field(2.0, gt=0.0, le=1e6)
    """Memory of a process that calls functions."""
    baseline: Annotated[Literal["group_mean", "leave_one_out"], PACKED] = "group_mean"
    """grpo: reward from which an advantage counts: mean of the prompt's answers, or of the
    others."""
    scale: Annotated[Literal["deviation", "none"], PACKED] = "deviation"
    """grpo: divide advantages by the deviation of the prompt's rewards."""
    stop_after_equal: Annotated[int, PACKED] = Field(1, ge=1, le=MOST_ROUNDS)
    """Stop after this many consecutive rounds in which every prompt's answers have equal
    rewards."""


def expanded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed document in which each run with `rounds: N` is N runs NAME-1, ..., NAME-N:
    each starts from the one before and takes the next prompts. Raises `UserError` for a wrong
    number and for a name that is taken."""
    runs = document.get("runs")
    if not isinstance(runs, Mapping):
        return dict(document)
    every: dict[Any, Any] = {}
    for name, override in runs.items():
        has_rounds = isinstance(override, Mapping) and "rounds" in override
        own = _rounds(str(name), override) if has_rounds else {name: override}
        for taken in own.keys() & (every.keys() | (runs.keys() - {name})):
            bound = f"it makes a run {taken}, and another run has this name"
            raise setting_error(f"runs.{name}.rounds", override["rounds"], bound, "Rename one")
        every |= own
    return {**document, "runs": every}


def _rounds(name: str, override: Mapping[str, Any]) -> dict[str, Any]:
    rounds, shared = override["rounds"], {k: v for k, v in override.items() if k != "rounds"}
    if type(rounds) is not int or not 1 <= rounds <= MOST_ROUNDS:
        bound = f"it must be a whole number, 1 to {MOST_ROUNDS}"
        raise setting_error(f"runs.{name}.rounds", rounds, bound, "Correct it")
    runs = {}
    for number in range(1, rounds + 1):
        start = {} if number == 1 else {"start_from": f"{name}-{number - 1}"}
        sections = {"train": start, "answers": {"round": number}}
        runs[f"{name}-{number}"] = merge(shared, sections)
    return runs

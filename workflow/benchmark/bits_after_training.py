"""What 4 bits of the frozen base cost after training: variants of a base, each tuned with the same
rows and steps, and the held-out loss of their own kind of text and of another.

A variant is a stock model whose linears have the values that its base decodes to, in float32:
`quantize.method: absmax` or the files of a calibrated base, with the original values of kept
linears. LoRA is PEFT's. A variant and seed is a line of the output; finished ones are not repeated.
It measures bits, not the engine."""

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import Array, TokenStore
from workflow.lib.evaluation.intervals import signed_ratio
from workflow.lib.export.stock_models import load_base
from workflow.lib.quantization.calibration import put_absmax_
from workflow.lib.settings.config import QuantizeConfig

logger = logging.getLogger("workflow")
CPU = torch.device("cpu")
Rows = Sequence[Mapping[str, Any]]  # lines of the output
Losses = dict[str, list[tuple[float, int]]]  # by source: nats and predicted tokens of documents


@dataclass(frozen=True)
class Variant:
    """A base: `method` of its codes, and the share of weights in 16 bits, in `order`."""

    name: str
    method: str = "absmax"  # or `calibrated`
    share: float = 0.0
    order: str = "sensitivity"  # or `random`


VARIANTS = (
    Variant("16 bits", share=1.0),
    Variant("NF4"),
    Variant("NF4, calibrated", "calibrated"),
    Variant("kept 10%", share=0.1),
    Variant("kept 25%", share=0.25),
    Variant("kept 50%", share=0.5),
    Variant("random 25%", share=0.25, order="random"),
    Variant("kept 20%, calibrated", "calibrated", 0.2),
    Variant("random 20%, calibrated", "calibrated", 0.2, "random"),
)


@dataclass(frozen=True)
class Recipe:
    """The training of every variant."""

    steps: int  # 0: none is trained
    rows: int  # of a step
    learning_rate: float
    rank: int = 16
    heldout_tokens: int = 2500  # of a source, the first documents that hold so many


class BitsBenchmark:
    """The model, its tokens, and the order in which linears are kept. It holds three sets of
    weights in float32: of the original, rounded by absmax, and calibrated."""

    def __init__(
        self, model: Path, calibrated: Path | None, store: TokenStore, costs: Mapping[str, float]
    ) -> None:
        """calibrated: a calibrated base of the model; costs: nats a token by linear."""
        self._name, self._store, self._costs = model.name, store, costs
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.requires_grad_(False)
        self._weights = {"none": _copied(self._linears)}
        for path, linear in self._linears.items():
            put_absmax_(linear, QuantizeConfig(), path=path, paths=self._linears)
        self._weights["absmax"] = _copied(self._linears)
        if calibrated is not None:
            self._weights["calibrated"] = _decoded(calibrated, self._linears)
        self._before: dict[tuple[str, frozenset[str]], Losses] = {}

    @property
    def _linears(self) -> dict[str, Any]:
        return {path: self._model.get_submodule(path) for path in self._costs}

    def can(self, variant: Variant) -> bool:
        """Whether the files of a variant are there."""
        return variant.method in self._weights

    def measure(self, variant: Variant, seed: int, recipe: Recipe) -> dict[str, Any]:
        """Return the held-out losses (summed nats by document and source) of a variant before and
        after its training."""
        sizes = {path: x.numel() for path, x in self._weights["none"].items()}
        kept = self._kept(variant, sizes, seed)
        for path, linear in self._linears.items():
            linear.weight.copy_(self._weights["none" if path in kept else variant.method][path])
        base = (variant.method, kept)
        if base not in self._before:  # another seed's may be the same
            self._before[base] = self._losses(self._model, recipe)
        before = after = self._before[base]
        if recipe.steps:
            torch.manual_seed(seed)
            rank = recipe.rank
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            tuned: Any = get_peft_model(self._model, config)
            self._train(tuned, seed, recipe)
            after = self._losses(tuned, recipe)
            self._model = tuned.unload()
        return {
            "model": self._name,
            "variant": variant.name,
            "seed": seed,
            "share_in_16_bits": sum(sizes[path] for path in kept) / sum(sizes.values()),
            "recipe": vars(recipe),
            "tokens": {name: [n for _, n in documents] for name, documents in before.items()},
            "before": {name: [x for x, _ in documents] for name, documents in before.items()},
            "after": {name: [x for x, _ in documents] for name, documents in after.items()},
        }

    def _kept(self, variant: Variant, sizes: Mapping[str, int], seed: int) -> frozenset[str]:
        order = sorted(sizes, key=lambda path: -self._costs[path] / sizes[path])
        if variant.order == "random":
            random.Random(seed).shuffle(order)
        kept, used, allowed = set[str](), 0, variant.share * sum(sizes.values())
        for path in order:
            if used + sizes[path] > allowed:
                break
            used += sizes[path]
            kept.add(path)
        return frozenset(kept)

    def _train(self, model: nn.Module, seed: int, recipe: Recipe) -> None:
        trained = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
        order = np.random.default_rng(seed).permutation(self._store.num_rows)
        for step in range(recipe.steps):
            rows = sorted(order[step * recipe.rows : (step + 1) * recipe.rows].tolist())
            trained_tokens = int(self._store.loss_mask[rows][:, 1:].sum())
            for row in rows:
                arrays = (self._store.input_ids, self._store.loss_mask, self._store.position_ids)
                loss = _summed_loss(model, *(array[row] for array in arrays))
                (loss / trained_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _losses(self, model: nn.Module, recipe: Recipe) -> Losses:
        """Return summed loss and predicted tokens of held-out documents by source."""
        losses: Losses = {}
        read = dict.fromkeys(self._store.heldout_sources(), 0)
        documents = self._store.heldout_documents()
        for (ids, mask), source in zip(documents, self._store.heldout_sources(), strict=True):
            if read[source] < recipe.heldout_tokens:
                read[source] += len(ids)
                one = float(_summed_loss(model, ids, mask)), int(mask[1:].sum())
                losses.setdefault(source, []).append(one)
        return losses


def _copied(linears: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {path: linear.weight.clone() for path, linear in linears.items()}


def _decoded(base: Path, paths: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the weights of a base's linears, fp32."""
    model = load_base(Checkpoint(base), device=CPU, compute_dtype=torch.float32, attention="sdpa")
    weights = {path: model.get_submodule(path).weight for path in paths}
    return {path: _values(weight) for path, weight in weights.items()}


def _values(weight: Any) -> torch.Tensor:
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach().float()  # type: ignore[no-any-return]
    return dequantize_4bit(weight.data, state).reshape(state.shape).float()


def _summed_loss(
    model: nn.Module, ids: Array, mask: Array, positions: Array | None = None
) -> torch.Tensor:
    """Return the summed -log p (nats) of the tokens of a row that `mask` predicts."""
    row = torch.from_numpy(ids.astype(np.int64))
    targets = 1 + torch.from_numpy(mask[1:].nonzero()[0])
    position_ids = None if positions is None else torch.from_numpy(positions.astype(np.int64))[None]
    options = {"position_ids": position_ids, "use_cache": False, "logits_to_keep": targets - 1}
    logits = model(input_ids=row[None], **options).logits[0]
    return nn.functional.cross_entropy(logits.float(), row[targets], reduction="sum")


def finished(path: Path) -> set[tuple[str, int]]:
    """Return the variants and seeds of an output."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = map(json.loads, lines)
    return {(row["variant"], row["seed"]) for row in rows}


HEAD = (
    "model", "base", "in 16 bits, percent", "text", "training", "seeds", "documents",
    "nats per token", "more than 16 bits", "from", "to", "p", "more than NF4", "from", "to", "p",
)  # fmt: skip


def table(rows: Rows) -> list[tuple[Any, ...]]:
    """Return the lines of a table, `HEAD` first: means over seeds, and how much more than bases in
    16 bits and in NF4 with the same seeds, paired over documents."""
    return [HEAD, *(line for own in _groups(rows, "model") for line in _lines(own))]


def _groups(rows: Rows, key: str) -> list[Rows]:
    """Return the rows of each value of a key, in the order of the first ones."""
    return [[row for row in rows if row[key] == x] for x in dict.fromkeys(x[key] for x in rows)]


def _lines(rows: Rows) -> Iterator[tuple[Any, ...]]:
    for source in rows[0]["tokens"]:
        for when in ("before", "after"):
            for own in _groups(rows, "variant"):
                yield *_facts(own, source, when), *_gaps(own, rows, source, when)


def _facts(own: Rows, source: str, when: str) -> Iterator[Any]:
    tokens = own[0]["tokens"][source]
    share = 100 * mean(row["share_in_16_bits"] for row in own)
    nats = mean(sum(row[when][source]) for row in own) / sum(tokens)
    yield from (own[0]["model"], own[0]["variant"], f"{share:.0f}", source, when)
    yield from (len(own), len(tokens), f"{nats:.4f}")


def _gaps(own: Rows, rows: Rows, source: str, when: str) -> Iterator[str]:
    """Yield how much more than each other base the own one loses, the interval's ends, and p."""
    for name in ("16 bits", "NF4"):
        others = {row["seed"]: row for row in rows if row["variant"] == name}
        gaps = [
            np.subtract(row[when][source], others[row["seed"]][when][source])
            for row in own
            if row["variant"] != name and row["seed"] in others
        ]
        if not gaps:
            yield from [""] * 4
            continue
        more = signed_ratio(np.mean(gaps, axis=0), own[0]["tokens"][source])
        low, high = more.ci95 or (float("nan"),) * 2
        yield from (f"{x:.4f}" for x in (more.value, low, high, more.p_value))

"""What 4 bits of the frozen base cost after training: variants of a base, each tuned with the same
rows and steps, and the held-out loss of their own kind of text and of another.

A variant is a stock model whose linears have the values that its base decodes to, in float32:
`quantize.method: absmax` or the files of a calibrated base, with the original values of kept
linears. LoRA is PEFT's. A variant and seed is a line of the output; finished ones are not repeated.
It measures bits, not the engine."""

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import Document, TokenStore
from workflow.lib.evaluation.intervals import signed_ratio
from workflow.lib.export.stock_models import load_base
from workflow.lib.quantization.calibration import put_absmax_
from workflow.lib.settings.config import QuantizeConfig

logger = logging.getLogger("workflow")
CPU = torch.device("cpu")


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
    documents: int = 24  # most held-out ones of a source


class BitsBenchmark:
    """The model, its tokens, and the order in which linears are kept."""

    def __init__(
        self, model: Path, calibrated: Path | None, store: TokenStore, costs: Mapping[str, float]
    ) -> None:
        """calibrated: a calibrated base of the model; costs: nats a token by linear."""
        self._folder, self._calibrated, self._store, self._costs = model, calibrated, store, costs

    def can(self, variant: Variant) -> bool:
        """Whether the files of a variant are there."""
        return variant.method == "absmax" or self._calibrated is not None

    def measure(self, variant: Variant, seed: int, recipe: Recipe) -> dict[str, Any]:
        """Return the held-out losses (summed nats by document and source) of a variant before and
        after its training."""
        model, share = self._base(variant, seed)
        before = after = self._losses(model, recipe)
        config = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules="all-linear")
        if recipe.steps:
            torch.manual_seed(seed)
            tuned = get_peft_model(model, config)
            self._train(tuned, seed, recipe)
            after = self._losses(tuned, recipe)
        return {
            "variant": variant.name,
            "seed": seed,
            "share_in_16_bits": share,
            "recipe": vars(recipe),
            "tokens": {name: [n for _, n in documents] for name, documents in before.items()},
            "before": {name: [x for x, _ in documents] for name, documents in before.items()},
            "after": {name: [x for x, _ in documents] for name, documents in after.items()},
        }

    def _base(self, variant: Variant, seed: int) -> tuple[nn.Module, float]:
        """Return a variant's model, and the share of its linears' weights in 16 bits."""
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()
        model.requires_grad_(False)
        linears = {path: model.get_submodule(path) for path in self._costs}
        kept = self._kept(variant, {path: x.weight.numel() for path, x in linears.items()}, seed)
        rounded = {path: x for path, x in linears.items() if path not in kept}
        if variant.method == "calibrated":
            assert self._calibrated is not None, "its files were looked for"
            base = load_base(
                Checkpoint(self._calibrated),
                device=CPU,
                compute_dtype=torch.float32,
                attention="sdpa",
            )
            for path, linear in rounded.items():
                linear.weight.copy_(_decoded(base.get_submodule(path)))
        else:
            for path, linear in rounded.items():
                put_absmax_(linear, QuantizeConfig(), path=path, paths=rounded)
        sizes = {path: x.weight.numel() for path, x in linears.items()}
        return model, sum(sizes[path] for path in kept) / sum(sizes.values())

    def _kept(self, variant: Variant, sizes: Mapping[str, int], seed: int) -> set[str]:
        order = sorted(sizes, key=lambda path: -self._costs[path] / sizes[path])
        if variant.order == "random":
            random.Random(seed).shuffle(order)
        kept, used, allowed = set[str](), 0, variant.share * sum(sizes.values())
        for path in order:
            if used + sizes[path] > allowed:
                break
            used += sizes[path]
            kept.add(path)
        return kept

    def _train(self, model: nn.Module, seed: int, recipe: Recipe) -> None:
        trained = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
        order = np.random.default_rng(seed).permutation(self._store.num_rows)
        for step in range(recipe.steps):
            rows = sorted(order[step * recipe.rows : (step + 1) * recipe.rows].tolist())
            ids = torch.from_numpy(self._store.input_ids[rows].astype(np.int64))
            positions = torch.from_numpy(self._store.position_ids[rows].astype(np.int64))
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = _summed_loss(logits, ids, torch.from_numpy(self._store.loss_mask[rows]))
            (loss / int(self._store.loss_mask[rows][:, 1:].sum())).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _losses(self, model: nn.Module, recipe: Recipe) -> dict[str, list[tuple[float, int]]]:
        """Return summed loss and predicted tokens of held-out documents by source."""
        losses: dict[str, list[tuple[float, int]]] = {}
        documents = self._store.heldout_documents()
        pairs = zip(documents, self._store.heldout_sources(), strict=True)
        for (tokens, mask), source in pairs:
            if len(losses.setdefault(source, [])) < recipe.documents:
                losses[source].append(_document_loss(model, (tokens, mask)))
        return losses


def _decoded(linear: Any) -> torch.Tensor:
    """Return the weight of a linear of a loaded base, fp32."""
    state = getattr(linear.weight, "quant_state", None)
    if state is None:
        weight: torch.Tensor = linear.weight
        return weight.float()
    flat = dequantize_4bit(linear.weight.data, state)
    return flat.reshape(state.shape).float()


def _summed_loss(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the summed -log p (nats) of the tokens that `mask` (rows, tokens) predicts."""
    predicted = mask[:, 1:]
    return nn.functional.cross_entropy(
        logits[:, :-1][predicted].float(), ids[:, 1:][predicted], reduction="sum"
    )


def _document_loss(model: nn.Module, document: Document) -> tuple[float, int]:
    ids, mask = (torch.from_numpy(np.array(x)) for x in document)
    ids = ids.long()[None]
    loss = _summed_loss(model(input_ids=ids, use_cache=False).logits, ids, mask[None])
    return float(loss), int(mask[1:].sum())


def finished(path: Path) -> set[tuple[str, int]]:
    """Return the variants and seeds of an output."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = map(json.loads, lines)
    return {(row["variant"], row["seed"]) for row in rows}


def table(rows: Sequence[Mapping[str, Any]], *, beside: str = "16 bits") -> str:
    """Return the measured losses as a Markdown table: means over seeds, and how much more than
    `beside` with the same seed, paired over documents and seeds."""
    sources = list(rows[0]["tokens"])
    heads = [f"{source}, {when}" for source in sources for when in ("before", "after")]
    lines = ["| base | in 16 bits | seeds | " + " | ".join(f"{x} | more" for x in heads) + " |"]
    lines.append("|---" * (3 + 2 * len(heads)) + "|")
    reference = {row["seed"]: row for row in rows if row["variant"] == beside}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [x for x in rows if x["variant"] == name and x["seed"] in reference]
        if own:
            cells = [_cells(own, reference, x, y) for x in sources for y in ("before", "after")]
            share = f"{100 * own[0]['share_in_16_bits']:.0f}%"
            lines.append(f"| {name} | {share} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(
    rows: Sequence[Mapping[str, Any]],
    reference: Mapping[int, Mapping[str, Any]],
    source: str,
    when: str,
) -> str:
    losses = np.concatenate([row[when][source] for row in rows])
    others = np.concatenate([reference[row["seed"]][when][source] for row in rows])
    tokens = np.concatenate([row["tokens"][source] for row in rows])
    more = signed_ratio(losses - others, tokens)
    low, high = more.ci95 or (more.value, more.value)
    return f"{losses.sum() / tokens.sum():.4f} | {more.value:.4f} [{low:.4f}, {high:.4f}]"

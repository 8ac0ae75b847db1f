"""Proof that an exported adapter is the trained one, by a digest of its values and fp32 logits.

`finetune` records both from the sharded model; `consolidate` computes them again from the exported
files with stock Transformers and PEFT. Logits detect an adapter that is applied differently."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from workflow.lib.artifacts.records import Parity, Provenance
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.model.architecture.routers import CORRECTION
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.system.files import atomic_path

DOCUMENTS = 2  # held-out documents compared
POSITIONS = 32  # last positions of each: 32 x 128k logits in fp32 are 16 MiB

# Allowed root mean square of the differences, as a share of that of the logits. Not the largest
# difference: of millions of logits in 16 bits one is always far off. Measurements are in
# docs/numerics.md.
RELATIVE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def trained_logits(
    training: CausalLMForTraining,
    store: TokenStore,
    *,
    device: torch.device,
    most_tokens: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return `input_ids.<i>`, `logits.<i>` (positions, vocab) and `digest`, CPU. Collective.
    most_tokens: of a document, None: all."""
    training.eval()
    tensors = {"digest": adapter_digest(trainable_parameters(training))}
    with forward_only(training):
        for number, (ids, _) in enumerate(store.heldout_documents()[:DOCUMENTS]):
            row = torch.from_numpy(ids[:most_tokens].astype("int64")).to(device)
            positions = torch.arange(len(row), device=device)
            logits = training.logits(row[None], positions[None], positions[-POSITIONS:]).cpu()
            tensors |= {f"input_ids.{number}": row.cpu(), f"logits.{number}": logits.contiguous()}
    return tensors


def adapter_digest(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the SHA-256 (32,) uint8 of an adapter's names and values. Collective if sharded."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(whole.float().cpu().contiguous().numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def save_logits(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


def _records(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        for number in range(sum(name.startswith("logits.") for name in names)):
            yield file.get_tensor(f"input_ids.{number}"), file.get_tensor(f"logits.{number}")


class _MeanSquare:
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, tensor: torch.Tensor) -> None:
        square = float(tensor.double().square().sum())
        self._sum += square if math.isfinite(square) else math.inf
        self._count += tensor.numel()

    def root(self) -> float:
        return math.sqrt(self._sum / self._count)


def _holds(model: Any, stored: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a PEFT model has exactly these tensors, each rounded to its dtype."""
    held: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return held.keys() == stored.keys() and all(
        torch.equal(tensor.cpu(), stored[name].to(tensor.dtype)) for name, tensor in held.items()
    )


@torch.no_grad()
def compare_logits(
    model: Any,
    path: Path,
    *,
    adapter: Adapter,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> Parity:
    """Compare a stock PEFT model with the record at `path`; adapter: the exported, with the trained
    values. A difference far below `adapter_effect` cannot be the base's."""
    model.eval()
    with safe_open(path, framework="pt") as file:
        digest = file.get_tensor("digest")
    stored, names = adapter.tensors(), adapter.names
    trained = {
        names.trained(name): tensor
        for name, tensor in stored.items()
        if not name.endswith(CORRECTION)  # the base's (`adapter_files.with_corrections`)
    }
    identical = torch.equal(digest, adapter_digest(trained)) and _holds(model, stored)
    difference, effect, magnitude = _MeanSquare(), _MeanSquare(), _MeanSquare()
    agreeing = positions = rows = 0
    for ids, logits in _records(path):
        row = ids[None].to(device)
        count = logits.shape[0]
        reloaded = model(input_ids=row).logits[0, -count:].float().cpu()
        with model.disable_adapter():
            plain = model(input_ids=row).logits[0, -count:].float().cpu()
        difference.add(reloaded - logits)
        effect.add(plain - logits)
        magnitude.add(logits)
        agreeing += int((reloaded.argmax(-1) == logits.argmax(-1)).sum())
        positions, rows = positions + count, rows + 1
    tolerance = RELATIVE_TOLERANCE[compute_dtype] * magnitude.root()
    return Parity(
        passed=identical and difference.root() <= tolerance < math.inf,
        identical_values=identical,
        rms_difference=difference.root(),
        tolerance=tolerance,
        relative_tolerance=RELATIVE_TOLERANCE[compute_dtype],
        rms_logit=magnitude.root(),
        adapter_effect=effect.root(),
        argmax_agreement=agreeing / positions,
        rows=rows,
        positions=positions,
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        reference="the trained model, as it was sharded",
        reloaded="stock Transformers and PEFT from the exported files",
        provenance=Provenance.now(),
    )

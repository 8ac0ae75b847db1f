"""Files of a model and of its tokenizer in a folder, and files that are missing."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from workflow.lib.checkpoints.files.config_file import read_bounded
from workflow.lib.checkpoints.files.safetensors_headers import INDEX, SINGLE, is_beside
from workflow.lib.system.errors import UserError
from workflow.lib.system.number_formats import listed_names

# Files of a local folder whose change makes derived artifacts stale.
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
# Preprocessing of a multimodal model's images and sounds: the merged model needs it.
PROCESSOR_PATTERN = "*processor_config.json"
MODEL_PATTERNS = (
    "config.json",
    "generation_config.json",
    PROCESSOR_PATTERN,
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_PATTERNS,
)
CONFIG = "config.json"
WEIGHTS = "transformers_weights"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TEKKEN = "tekken.json"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
# Weights that Transformers ignores: formats that can run code when they are read, other precisions,
# Mistral's own format, shards without an index.
OTHER_WEIGHTS = {
    "*.bin": "pickles, which can run code when they are read",
    "*.pt": "pickles, which can run code when they are read",
    "*.pth": "pickles, which can run code when they are read",
    "*.ckpt": "pickles, which can run code when they are read",
    "*.pkl": "pickles, which can run code when they are read",
    "*.gguf": "GGUF files",
    "consolidated*.safetensors": "Mistral's own format",
    "model-*.safetensors": f"shards without {INDEX}",
    "model.*.safetensors": "a variant, which Transformers loads only if it is asked for by name",
    "*.safetensors": "files of other names",
}


class Fault(NamedTuple):
    """Why files are no trainable model, and what to change."""

    bound: str
    change: str


def fault_of_files(names: Collection[str], *, named_weights: str | None = None) -> Fault | None:
    """Return the fault of a model's files by their names, or None. named_weights: the file that
    config.json names (`transformers_weights`)."""
    if ADAPTER in names:
        return _adapter_fault(names)
    if CONFIG not in names:
        return Fault(
            f"it has no {CONFIG}; it has {listed_names(sorted(names))}",
            "Name the folder or repository of a Transformers model",
        )
    weights = {named_weights} if named_weights else {SINGLE, INDEX}
    return None if weights & {*names} else _weights_fault(names, weights)


def fault_of_tokenizer(names: Collection[str]) -> Fault | None:
    """Return the fault of a tokenizer's files by their names, or None."""
    if any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZERS):
        return None
    if TEKKEN in names:
        return Fault(
            f"its only tokenizer is {TEKKEN}, Mistral's own format, which does not tell where each "
            "token stands in the text",
            "Name a repository or folder of the same model with tokenizer.json (later uploads of "
            "Mistral, or conversions, have one)",
        )
    return Fault(
        f"it has no tokenizer; it has {listed_names(sorted(names))}",
        "Put the model's tokenizer.json and tokenizer_config.json beside it",
    )


def named_weights(folder: Path) -> str | None:
    """Return the file that config.json names; raises `UserError` if it is not beside it."""
    path = folder / CONFIG
    named = read_bounded(path).get(WEIGHTS) if path.is_file() else None
    if named is not None and not is_beside(folder, str(named)):
        raise UserError(
            f"{path}: {WEIGHTS} = {named!r}: there is no such file beside it. Complete the "
            "download, or check model.source."
        )
    return named if named is None else str(named)


def fault_of_adapter(names: Collection[str]) -> Fault | None:
    """Return the fault of the files of an adapter's folder or repository by their names."""
    if {ADAPTER, ADAPTER_WEIGHTS} <= {*names}:
        return None
    if ADAPTER not in names:
        change = "Name the folder or repository of a PEFT adapter"
        if CONFIG in names:
            change = "To train a new adapter on this model, set model.source to it"
        return Fault(f"it has no {ADAPTER}; it has {listed_names(sorted(names))}", change)
    if "adapter_model.bin" in names:
        return Fault(
            f"its weights are adapter_model.bin, a pickle, and {ADAPTER_WEIGHTS} is not there",
            'Convert a copy of it once in its folder: python -c "import torch; from '
            "safetensors.torch import save_file; save_file({n: t.contiguous() for n, t in "
            "torch.load('adapter_model.bin', map_location='cpu', weights_only=True).items()}, "
            f"'{ADAPTER_WEIGHTS}')\", and name that folder",
        )
    return Fault(
        f"it has no {ADAPTER_WEIGHTS}; it has {listed_names(sorted(names))}", "Complete the copy"
    )


def _adapter_fault(names: Collection[str]) -> Fault:
    if CONFIG not in names:
        return Fault(
            f"it is an adapter ({ADAPTER}), not a model",
            "Name the model that it is on, and the adapter as train.start_from to continue it",
        )
    return Fault(
        f"{ADAPTER} lies beside the model, and Transformers loads that adapter with it, so the "
        "trained base would not be the model that others load",
        "Move the files adapter_* out of a copy of the folder, or merge that adapter into the "
        "model, and name that folder",
    )


def _weights_fault(names: Collection[str], weights: Collection[str]) -> Fault:
    wanted = " nor ".join(sorted(weights, key=len))
    for pattern, kind in OTHER_WEIGHTS.items():
        matches = sorted(name for name in names if fnmatchcase(name, pattern))
        if matches:
            return Fault(
                f"it has only {listed_names(sorted(matches))} ({kind}), neither {wanted}",
                "Convert them with `save_pretrained` of Transformers, or name a folder or "
                "repository with safetensors weights",
            )
    return Fault(
        f"it has no weights, neither {wanted}",
        "Complete the download, or name another folder or repository",
    )

"""The files from which the installed Transformers loads a model, by its own choice: a folder may
hold a single file beside shards, other sets of shards, variants and pickles."""

from pathlib import Path

import transformers
from transformers.modeling_utils import _get_resolved_checkpoint_files

from workflow.lib.checkpoints.files.model_files import fault_of_files, named_weights
from workflow.lib.checkpoints.files.safetensors_headers import (
    INDEX,
    SINGLE,
    TensorInfo,
    read_headers,
    read_index,
)
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.undocumented_interfaces import check_interfaces


def loaded_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor that Transformers reads of a folder, by stored name. Raises `UserError`
    if safetensors are absent, missing, broken, or do not belong together."""
    files = loaded_files(folder)
    tensors = read_headers(files)
    index = folder / (named_weights(folder) or INDEX)
    if index.suffix == ".json" and files != [folder / SINGLE]:
        _check_index(index, tensors)
    return tensors


def _check_index(index: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise `UserError` unless each tensor is read from its file in the index."""
    for name, file in read_index(index).items():
        if name not in tensors:
            held = "but it does not"
        elif tensors[name].file != file:
            held = f"but Transformers takes that of {tensors[name].file}, which has one too"
        else:
            continue
        raise UserError(
            f"{index} says that {file} holds {name!r}, {held}. The files do not belong together: "
            "download them again."
        )


def loaded_files(folder: Path) -> list[Path]:
    """Return the safetensors files that Transformers reads of a model's folder, in its order: the
    last file with a tensor counts. Raises `UserError` as `loaded_tensors`."""
    check_interfaces("transformers")
    named = named_weights(folder)
    fault = fault_of_files({path.name for path in folder.glob("*")}, named_weights=named)
    if fault is not None:
        raise setting_error("model.source", str(folder), *fault)
    if named is None and not (folder / SINGLE).is_file():
        read_index(folder / INDEX)  # within bounds, before Transformers does
    try:
        files, _ = _get_resolved_checkpoint_files(
            str(folder),
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=named,
            download_kwargs={"local_files_only": True},
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: Transformers {transformers.__version__} finds no weights in it "
            f"({error!r}). Complete the download, or check model.source."
        ) from None
    return [Path(file) for file in files or ()]

"""Files and folders in the settings, checked before anything starts."""

import re
from pathlib import Path

from workflow.lib.artifacts.layout import SERVING
from workflow.lib.checkpoints.files.model_files import (
    fault_of_files,
    fault_of_tokenizer,
    named_weights,
)
from workflow.lib.data.reading.sources import resolve_splits, unexpanded
from workflow.lib.settings.config import RunConfig, is_hub_id, path_exists
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.input_files import why_unreadable
from workflow.lib.system.near_names import did_you_mean

FOLDERS = ("model.source", "evaluate.tasks_dir")
FILES = ("data.chat_template", "quantize.calibration_text")
# What the hub allows; some old datasets have no owner.
DATASET_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/)?[\w-][\w.-]*", re.ASCII)


def check_local_paths(name: str, run: RunConfig) -> None:
    """Raise `UserError` if a local path of the run is missing; hub ids are not looked up."""
    paths = {
        "data.chat_template": run.data.chat_template,
        "export.llama_cpp": run.export.llama_cpp and f"{run.export.llama_cpp}/{CONVERTER}",
        "evaluate.tasks_dir": run.evaluate.tasks_dir if run.evaluate.tasks else None,
        "quantize.calibration_text": run.quantize.calibration_text,
        **{f"rewards.functions.{key}": f.file for key, f in run.rewards.functions.items()},
    }
    servers = {"export.serve": run.export.serve == "vllm", "answers.sampler": run.serves_answers}
    for setting in [setting for setting, serves in servers.items() if serves]:
        if not Path(SERVING).exists():
            bound = f"the server's environment is not made ({SERVING})"
            change = "Run make serving in the folder of the Snakefile, or leave it out"
            raise UserError(f"run {name}: {setting_error(setting, 'vllm', bound, change)}")
    _refuse_gguf(run.model.source)
    _refuse_other_folders(run.model.source)
    if not is_hub_id(run.model.source):
        paths["model.source"] = run.model.source
        if run.model.revision is not None:
            raise UserError(
                f"model.revision = {run.model.revision!r} (run {name}): model.source = "
                f"{run.model.source!r} "
                "is a local directory, which has no revision. Remove revision, or name a hub id."
            )
    if run.data.source is not None:
        _check_dataset_id(name, run.data.source)
    else:
        try:
            splits = resolve_splits(run.data, root=Path())
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None
        for split, sources in splits.items():
            for file in (file.file for source in sources for file in source.files):
                _check_name(f"data.{split}", file)
                _check_readable(f"data.{split}", Path(file))
    for key, value in paths.items():
        if value is not None:
            check_path(key, value, run=name)


def check_prefix(prefix: str) -> None:
    """Raise `UserError` for a prefix of the module that rules or commands would misread."""
    if prefix and not re.fullmatch(r"/?[\w.][\w./-]*", prefix):
        bound = (
            "it holds other characters than letters, digits, '.', '_', '-' and '/', or begins "
            "with '-'"
        )
        raise setting_error("prefix of the module", prefix, bound, "Name another folder")


def _check_dataset_id(name: str, source: str) -> None:
    setting = f"data.source (run {name})"
    change = "Set data.source to null, and data.train to the files or the folder"
    if path_exists(source):
        bound = "a file or folder of this name is here, and data.source is for datasets of the hub"
        raise setting_error(setting, source, bound, f"{change}; or rename what is here")
    if not DATASET_ID.fullmatch(source):
        bound = "no dataset of the hub has such an id (owner/name)"
        raise setting_error(setting, source, bound, f"Correct it. For local data: {change}")


def check_path(key: str, value: str, *, run: str) -> None:
    """Raise `UserError` if a file or folder of a setting is unreadable, or no rule's input."""
    _check_name(key, value)
    if value.startswith("-"):
        reason = "it begins like an option of a command"
        raise setting_error(key, value, reason, f"Write ./{value}")
    if (why := why_unreadable(Path(value))) is not None:
        near = did_you_mean(value, root=Path(), is_folder=key in FOLDERS)
        raise UserError(
            f"{key} = {value!r} (run {run}): {why}. {unexpanded(value)}{near}Give a "
            "path that exists, relative to the folder you run in"
            + (", or a hub id of the form owner/name." if key == "model.source" else ".")
        )
    if key in FOLDERS and not Path(value).is_dir():
        raise setting_error(f"{key} (run {run})", value, "it is a file", "Name a folder")
    if key in FILES and Path(value).is_dir():
        raise setting_error(f"{key} (run {run})", value, "it is a folder", "Name a file in it")
    if Path(value).is_dir():
        for entry in sorted(Path(value).iterdir()):
            _check_name(key, str(entry))
            _check_readable(key, entry)


def _refuse_gguf(source: str) -> None:
    """Raise `UserError` for a GGUF file, or a folder with no other model, as base model."""
    path = Path(source)
    if path_exists(source) and path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or any(path.glob("*.safetensors")):
            return
        path = files[0]
    elif path.suffix != ".gguf":
        return
    raise setting_error(
        "model.source",
        source,
        "it is a GGUF file, and a base model is a folder with safetensors",
        'Name the model that it was made of. Or convert it once: python -c "from transformers '
        "import AutoModelForCausalLM as M, AutoTokenizer as T, GgufConfig as G; "
        f"of = dict(pretrained_model_name_or_path={str(path.parent)!r}, gguf_file={path.name!r}); "
        "M.from_pretrained(**of, dtype='bfloat16', quantization_config=G(dequantize=True))"
        ".save_pretrained('converted'); "
        "T.from_pretrained(**of).save_pretrained('converted')\" (needs pip install gguf), and name "
        "the folder converted. What a GGUF file of few bits has lost stays lost",
    )


def _refuse_other_folders(source: str) -> None:
    """Raise `UserError` for a folder that is no base: an adapter, no weights, no tokenizer."""
    folder = Path(source)
    if is_hub_id(source) or not path_exists(source) or not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir()}
    fault = fault_of_files(names, named_weights=named_weights(folder)) or fault_of_tokenizer(names)
    if fault is not None:
        raise setting_error("model.source", source, *fault)


def _check_readable(key: str, path: Path) -> None:
    """Raise `UserError` for a pipe, a device or an unreadable file: a stage would hang on it."""
    if (why := why_unreadable(path)) is not None:
        raise setting_error(key, str(path), why, "Remove it, or put a readable file there")


def _check_name(key: str, path: str) -> None:
    """Raise `UserError` for characters by which Snakemake changes a path."""
    for characters, words, meaning in (
        ("{}", "braces", "wildcards"),
        ("<>", "angle brackets", "variables of a path"),
    ):
        if set(characters) & set(path):
            reason = f"Snakemake reads {words} in a path as {meaning}"
            raise setting_error(key, path, reason, unexpanded(path) or "Rename the file or folder")

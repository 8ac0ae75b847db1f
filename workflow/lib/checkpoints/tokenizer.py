"""The base model's tokenizer: loaded, checked for the needs of training, and hashed."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workflow.lib.checkpoints.files.config_file import read_bounded, text_part
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256
from workflow.lib.system.input_files import read_input
from workflow.lib.system.limits import WatchedWork

EXCESS = (
    "model.source: the tokenizer of {item} {excess} while it is loaded. Take its tokenizer.json "
    "from its source again, or name another model."
)
MAX_SECONDS, MAX_BYTES = 300.0, 2**32  # vocabularies of 256,000 tokens take 3 s and 0.6 GiB
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"  # the template that Transformers uses for conversations with tools
# Files whose chat template only `AutoProcessor` reads, in its order.
PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
# Files that can change a tokenizer, by the names that Transformers saves and reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    *PROCESSOR_FILES,
)
NAMED_TEMPLATES = "additional_chat_templates"  # their folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, without network or the model's code. A tokenizer
    without a chat template gets the processor's (LLaVA). Raises `UserError` if no fast tokenizer
    loads, if it has no eos token or reads special tokens as text, and if the folder's config.json
    has absurd sizes."""
    if (folder / "config.json").is_file():
        read_bounded(folder / "config.json")
    try:
        with WatchedWork(EXCESS, str(folder), seconds=MAX_SECONDS, num_bytes=MAX_BYTES):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processor_template(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Transformers raises any error for broken files, Rust panics
        if "trust_remote_code" in str(error):
            reason = "its tokenizer is code of the model's repository, which is never run"
            change = "Name a model whose tokenizer Transformers knows"
            raise _tokenizer_error(folder, reason, change) from error
        reason = f"the folder holds no tokenizer that loads ({error})"
        raise _tokenizer_error(folder, reason, "Name a model folder with tokenizer.json") from error
    if not tokenizer.is_fast:
        reason = (
            "the tokenizer has no tokenizer.json, which tells where each token stands in the text"
        )
        raise _tokenizer_error(folder, reason, "Convert it to a fast tokenizer and save it there")
    if tokenizer.eos_token_id is None:
        reason = "the tokenizer has no eos token, so a model could not learn to stop"
        raise _tokenizer_error(folder, reason, 'Set "eos_token" in its tokenizer_config.json')
    if getattr(tokenizer, "split_special_tokens", False):
        reason = "split_special_tokens is true, so tokens that a template writes are read as text"
        raise _tokenizer_error(folder, reason, "Set it to false in its tokenizer_config.json")
    return tokenizer


def _processor_template(folder: Path) -> Any:
    files = [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]
    templates = [read_bounded(file).get("chat_template") for file in files]
    return next(filter(None, templates), None)


def num_usable_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """Return the number of token ids that data may have: all of the tokenizer's, without those
    after its own vocabulary for which the model in `folder` has no rows, by its config.json (the
    image token of Gemma 3's text models). A tokenizer whose vocabulary or eos token does not fit is
    another model's: its size is refused (`planning.preflight.checks`)."""
    path = folder / "config.json"
    rows = text_part(read_bounded(path)).get("vocab_size") if path.is_file() else None
    used_rows = max(tokenizer.vocab_size, tokenizer.eos_token_id + 1)
    return min(len(tokenizer), rows) if rows is not None and used_rows <= rows else len(tokenizer)


def read_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """Return the text of the template file `path`, or for None the tokenizer's own template. Raises
    `UserError` if the file cannot be read, or if there is neither."""
    if path is not None:
        try:
            return read_input(Path(path))
        except UserError as error:
            reason = f"the file cannot be read as UTF-8 text ({error})"
            raise setting_error(
                "data.chat_template", path, reason, "Name a Jinja file, or null"
            ) from None
    template = default_template(tokenizer)
    if template is None:
        template_names = ", ".join(tokenizer.chat_template or ())
        has = (
            f"only templates named {template_names}, and none named default"
            if template_names
            else "none"
        )
        raise setting_error(
            "data.chat_template",
            None,
            f"conversations need a chat template, and the tokenizer has {has}",
            "Name a Jinja file (for base models workflow/resources/templates/plain.jinja), or use "
            "the format text",
        )
    return template.removeprefix("\ufeff")  # a byte order mark


def read_tool_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str | None:
    """Return the tokenizer's own template for conversations with tools, if it has one. A template
    file of the user's own serves all conversations."""
    template = tokenizer.chat_template
    if path is not None or not isinstance(template, dict):
        return None
    tool_template: str | None = template.get(TOOL_TEMPLATE)
    return tool_template


def default_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's template for conversations without tools; None without one."""
    template = tokenizer.chat_template
    default: str | None = template.get(DEFAULT_TEMPLATE) if isinstance(template, dict) else template
    return default


def trained_templates(
    tokenizer: PreTrainedTokenizerBase, trained: str | None
) -> str | dict[str, str] | None:
    """Return the templates to export: `trained`, and the tokenizer's other ones. Those stay only if
    `trained` is the tokenizer's own default, perhaps with arguments set at its beginning, which
    they get too. A template of the user's own serves all conversations."""
    own, default = tokenizer.chat_template, default_template(tokenizer)
    if isinstance(own, dict) and trained is not None and default and trained.endswith(default):
        head = trained.removesuffix(default)
        return {name: head + text for name, text in own.items()}
    return own if trained is None else trained


def tokenizer_sha256(folder: Path) -> str:
    """Return one SHA-256 over the names and digests of the tokenizer's files."""
    templates = sorted(
        path.relative_to(folder) for path in folder.glob(f"{NAMED_TEMPLATES}/*.jinja")
    )
    names = [*TOKENIZER_FILES, *map(str, templates)]
    present = [name for name in names if (folder / name).is_file()]
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in present]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _tokenizer_error(folder: Path, reason: str, change: str) -> UserError:
    return setting_error("model.source", str(folder), reason, change)

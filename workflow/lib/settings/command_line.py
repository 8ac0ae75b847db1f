"""Settings of the command line (`--config data='{heldout: null}'`), typed as in a file.

Snakemake reads every value in a section of the command line as text (YAML's BaseLoader), and passes
it to its jobs in the same way."""

import re
from collections.abc import Mapping, Sequence

import yaml

from workflow.lib.settings.yaml_files import misread_number
from workflow.lib.system.errors import UserError

# Each with its other spellings; of a repeated option Snakemake takes only the last.
LISTS = (("--config", "-C"), ("--configfile", "--configfiles"))


def check_options(words: Sequence[str]) -> None:
    """Raise `UserError` for settings before a repeated option, which Snakemake silently drops."""
    for names in LISTS:
        options = [word.partition("=")[0] for word in words if word.partition("=")[0] in names]
        if len(options) > 1:
            raise UserError(
                f"{names[0]} stands {len(options)} times in the command, and Snakemake would take "
                f"the last one alone. Give all behind one: {names[0]} A B"
            )


def is_dry_run(words: Sequence[str]) -> bool:
    """Whether a command plans jobs and runs none: `-n`, also among other letters (`-np`)."""
    return any(re.fullmatch(r"--dry-?run|-[a-zA-Z]*n[a-zA-Z]*", word) for word in words)


def as_in_yaml(value: object) -> object:
    """Return a value whose texts are typed as in a YAML file: null, true, false and numbers.

    Raises `UserError` for a text that YAML reads as another number than it looks like."""
    if isinstance(value, Mapping):
        return {key: as_in_yaml(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_in_yaml(item) for item in value]
    return _scalar(value) if isinstance(value, str) else value


def _scalar(text: str) -> object:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if (finding := misread_number(text, value)) is not None:
        raise UserError(f"--config: {finding}, or, if it is text, in quotes in a file of settings.")
    is_typed = isinstance(value, bool | int | float) or (value is None and text.strip())
    return value if is_typed else text

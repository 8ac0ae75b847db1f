"""Settings of the command line (`--config data='{heldout: null}'`), typed as in a file.

Snakemake reads a section of the command line with every value in it as text (YAML's BaseLoader),
and hands it to its jobs in the same way."""

from collections.abc import Mapping

import yaml


def as_in_yaml(value: object) -> object:
    """Return a value in which each text that YAML reads as null, true, false or a number is one."""
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
    is_typed = isinstance(value, bool | int | float) or (value is None and text.strip())
    return value if is_typed else text

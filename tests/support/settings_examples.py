"""Settings of documents, and the refusals of those that are wrong."""

from collections.abc import Mapping
from typing import Any

import pytest

from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.system.errors import UserError


def message(document: Mapping[str, Any]) -> list[str]:
    """Return the lines of the refusal of a document, without the headline."""
    with pytest.raises(UserError) as refusal:
        load_config(document)
    headline, *lines = str(refusal.value).splitlines()
    assert headline == "the settings are not valid:"
    return [line.strip() for line in lines]


def only(document: Mapping[str, Any]) -> RunConfig:
    (run,) = load_config(document)[1].values()
    return run

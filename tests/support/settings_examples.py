"""Settings of documents, and the refusals of those that are wrong."""

from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.refusals import refusal
from tests.support.workflow_project import REPOSITORY
from workflow.lib.settings.config import RunConfig, load_config


def message(document: Mapping[str, Any]) -> list[str]:
    """Return the lines of the refusal of a document, without the headline."""
    headline, *lines = refusal(load_config, document).splitlines()
    assert headline == "the settings are not valid:"
    return [line.strip() for line in lines]


def demo_runs(runs: Mapping[str, Any]) -> dict[str, RunConfig]:
    """Return runs with the demo's settings and their own."""
    demo = yaml.safe_load((REPOSITORY / "config.yaml").read_text(encoding="utf-8"))
    return load_config(demo | {"runs": runs})[1]


def only(document: Mapping[str, Any]) -> RunConfig:
    (run,) = load_config(document)[1].values()
    return run

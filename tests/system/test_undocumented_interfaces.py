"""The one list of undocumented names: the installed packages have them, and a lack is said
clearly."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from workflow.lib.system import undocumented_interfaces
from workflow.lib.system.errors import UserError
from workflow.lib.system.undocumented_interfaces import (
    INTERFACES,
    MODEL_PACKAGES,
    RECORDING_INTERFACES,
    Interface,
    check_interfaces,
    check_recordings,
)

ROOT = Path(__file__).resolve().parents[2]


def test_installed_packages_have_every_name():
    check_interfaces(*MODEL_PACKAGES, "lm_eval")
    check_recordings()


@pytest.mark.parametrize(
    "lacking",
    [
        Interface("torch", "_gone"),
        Interface("torch.gone", "there"),
        Interface("torch:Tensor", "_gone"),
        Interface("torch:Gone()", "there"),
    ],
    ids=str,
)
def test_release_that_lacks_a_name_is_refused(monkeypatch, lacking):
    monkeypatch.setattr(undocumented_interfaces, "INTERFACES", (*INTERFACES, lacking))
    expected = (
        f"torch {version('torch')} has no {lacking.owner}.{lacking.name}, which this workflow "
        "uses. Install the release that envs/pins.txt names."
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        check_interfaces(*MODEL_PACKAGES)


def test_every_private_attribute_of_packages_in_the_library_is_listed():
    """Whatever is read of other objects by a name with an underscore in front, outside of our own
    classes."""
    every = (*INTERFACES, *RECORDING_INTERFACES)
    parts = [(*re.split(r"[.:()]+", used.owner), used.name) for used in every]
    listed = {name for names in parts for name in names}
    own = {"_passed", "_eager"}
    files = {}
    for path in sorted((ROOT / "workflow" / "lib").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        defined = set(re.findall(r"(?:def |self\.|    )(_[a-z]\w*)", text))
        used = re.findall(r"(?<!self)(?<!cls)(?<!super\(\))\.(_[a-z]\w*)", text)
        files |= {name: path.name for name in used if name not in defined | own}
    assert {name for name in files if name not in listed} <= ALLOWED, files


# Of the standard library, read with `getattr` and a way to do without, or only ever set: families'
# code that asks for `_is_quantized` asks whether it is there. A layer that no longer calls its
# `_gradient_checkpointing_func` fails `test_recomputation`. A Trackio without `_next_step` is told
# before the first step (`live_view`).
ALLOWED = {
    *("_exit", "_current_frames", "_asdict", "_fields", "_replace"),
    *("_is_quantized", "_gradient_checkpointing_func", "_next_step"),
}

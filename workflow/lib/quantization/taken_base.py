"""A base published in NF4: its bytes are taken as they are, if the engine can compute with them."""

from collections.abc import Collection, Mapping
from typing import Any

from workflow.lib.kernels.nf4.decode import NESTED_BLOCK_SIZE
from workflow.lib.model.layers.expert_stacks import ExpertStack
from workflow.lib.model.published.converted_reader import ConvertedReader
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError, setting_error

ORIGINAL = "Set model.source to the original bf16, fp16 or fp32 checkpoint"


def check_taken(
    reader: ConvertedReader,
    linears: Collection[str],
    stacks: Mapping[str, ExpertStack],
    settings: QuantizeConfig,
) -> bool:
    """Tell whether a checkpoint is in NF4 already; raise `UserError` if it is, but not as the
    settings say, or not all of it. linears: paths of all that the engine expects in 4 bits."""
    states = {path: reader.nf4_state(f"{path}.weight") for path in linears}
    packed = {path: state for path, state in states.items() if state is not None}
    if not packed:
        return False
    if stacks:
        raise UserError(
            f"{reader.folder} is in NF4 already, and has experts ({min(stacks)}), of which it says "
            f"nothing in one piece. {ORIGINAL}."
        )
    if lacking := sorted(states.keys() - packed.keys()):
        raise UserError(
            f"{reader.folder} is in NF4 already, but {len(lacking)} of {len(states)} linears are "
            f"not ({lacking[0]} first), and the engine trains adapters on NF4 weights alone. "
            f"{ORIGINAL}, or to one whose linears are all in NF4."
        )
    if settings.method == "calibrated":
        bound = f"{reader.folder} is in NF4 already, and its bytes are taken as they are"
        raise setting_error("quantize.method", "calibrated", bound, f"Set absmax. Or: {ORIGINAL}")
    for path, state in packed.items():
        _check_state(path, state, settings)
    return True


def _check_state(path: str, state: Mapping[str, Any], settings: QuantizeConfig) -> None:
    """Raise `UserError` unless a linear is stored as the settings (and memory plan) say."""
    found = {"block_size": state["blocksize"], "double_quant": "nested_offset" in state}
    for key, value in found.items():
        if getattr(settings, key) != value:
            raise setting_error(
                f"quantize.{key}",
                getattr(settings, key),
                f"{path} of model.source is in NF4 already, with {value}",
                f"Set {key} to {str(value).lower()}",
            )
    nested = state.get("nested_blocksize", NESTED_BLOCK_SIZE)
    if nested != NESTED_BLOCK_SIZE:
        raise UserError(
            f"{path} of model.source has blocks of {nested} scales; {NESTED_BLOCK_SIZE} are known. "
            f"{ORIGINAL}."
        )

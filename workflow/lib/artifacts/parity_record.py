"""`consolidate/parity.json`, written by `export.parity`."""

from typing import Annotated

from pydantic import AllowInfNan

from workflow.lib.artifacts.records import Provenance, Record

# Infinite where a logit is not finite: such an export fails, and its record is not written.
Magnitude = Annotated[float, AllowInfNan(True)]


class Parity(Record):
    """`consolidate/parity.json`: the exported adapter beside the trained one."""

    passed: bool  # whether the values are the same and the logits within the tolerance
    identical_values: bool  # whether the exported adapter has the trained values, bit for bit
    rms_difference: Magnitude
    """Root mean square of the differences of logits, reloaded against trained."""
    tolerance: Magnitude  # the difference allowed: `relative_tolerance` times `rms_logit`
    relative_tolerance: float  # share of `rms_logit` that is allowed in this compute dtype
    rms_logit: Magnitude  # root mean square of the trained logits
    adapter_effect: Magnitude  # root mean square of what the adapter changes in the logits
    argmax_agreement: float  # share of positions with the same most likely token
    rows: int  # documents compared
    positions: int  # positions compared
    compute_dtype: str  # type of the computation
    reference: str  # what was compared with, in words
    reloaded: str  # what was compared, in words
    provenance: Provenance  # what made the file

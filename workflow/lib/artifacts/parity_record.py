"""`consolidate/parity.json`, written by `export.parity`."""

from typing import Annotated

from pydantic import AllowInfNan

from workflow.lib.artifacts.records import Provenance, Record

# Infinite where a logit is not finite: such an export fails, and its record is not written.
Magnitude = Annotated[float, AllowInfNan(True)]


class Parity(Record):
    """`consolidate/parity.json`: the exported adapter beside the trained one."""

    passed: bool
    """Whether the values are the same and the logits within the tolerance."""
    identical_values: bool
    """Whether the exported adapter has the trained values, bit for bit."""
    rms_difference: Magnitude
    """Root mean square of the differences of logits, reloaded against trained."""
    tolerance: Magnitude
    """The difference allowed: `relative_tolerance` times `rms_logit`."""
    relative_tolerance: float
    """Share of `rms_logit` that is allowed in this compute dtype."""
    rms_logit: Magnitude
    """Root mean square of the trained logits."""
    adapter_effect: Magnitude
    """Root mean square of what the adapter changes in the logits."""
    argmax_agreement: float
    """Share of positions with the same most likely token."""
    rows: int
    """Documents compared."""
    positions: int
    """Positions compared."""
    compute_dtype: str
    """Type of the computation."""
    reference: str
    """What was compared with, in words."""
    reloaded: str
    """What was compared, in words."""
    provenance: Provenance
    """What made the file."""

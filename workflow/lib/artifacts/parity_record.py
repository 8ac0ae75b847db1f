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
    max_abs_difference: Magnitude
    """Largest difference of a logit, reloaded against trained."""
    tolerance: Magnitude
    """Largest difference allowed: `relative_tolerance` times `max_abs_logit`."""
    relative_tolerance: float
    """Share of the largest logit that is allowed in this compute type."""
    max_abs_logit: Magnitude
    """Largest magnitude of a trained logit."""
    adapter_effect: Magnitude
    """How far the adapter moves a logit at most."""
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

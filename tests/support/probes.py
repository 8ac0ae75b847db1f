"""Made-up probes of machines."""

from collections.abc import Collection, Mapping

from workflow.lib.artifacts.records import Provenance
from workflow.lib.planning.probes import REPEATABLE, Measured, Probe


def probe(
    device: str,
    reference: Mapping[str, float],
    factor: float,
    *,
    vague: Collection[str] = (),
    created_utc: str = "2026-11-27T10:00:00Z",
) -> Probe:
    """A probe that finds so many times the reference's rates; vague: those that varied."""
    measured = {
        name: Measured(value=factor * value, spread=REPEATABLE * (2 if name in vague else 0.5))
        for name, value in reference.items()
    }
    made = Provenance.now().model_dump() | {
        "created_utc": created_utc,
        "packages": {"torch": "2.11.0"},
    }
    provenance = Provenance.model_validate(made)
    return Probe(device=device, driver="1", measured=measured, provenance=provenance)

"""Numbers and text for people: rounded, with units, and without invisible characters.

Formatting only: no function here computes a result. Digits are fixed by kind, so columns align."""

import math
import re
from collections.abc import Sequence

from workflow.lib.system.units import GIB, KIB, MIB

# Characters that act on a terminal or reorder text instead of showing: C0 (without tab and line
# feed), DEL, C1, bidirectional overrides and isolates (CVE-2021-42574), and lone surrogates (not
# UTF-8).
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return `text` with acting characters as their code, `[U+001B]` for ESC; CR LF as LF."""
    return _INVISIBLE.sub(lambda match: f"[U+{ord(match.group()):04X}]", text.replace("\r\n", "\n"))


def loss(value: float) -> str:
    """Nats per token, four decimals, with a true minus sign."""
    return minus(f"{value:.4f}")


def signed(value: float) -> str:
    """A difference, four decimals, always with its sign."""
    return minus(f"{value:+.4f}")


def general(value: float) -> str:
    """Four significant digits for any size: learning rates, tolerances, norms."""
    return minus(f"{value:.4g}")


def count(value: float) -> str:
    return minus(f"{value:,.0f}")


def share(value: float) -> str:
    return f"{value * 100:.1f} %"


def probability(value: float) -> str:
    """A p value with its relation: `p = 0.012`, or `p < 0.001`."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def size(value: float) -> str:
    """Bytes in the binary unit that fits: `21.30 GiB`, `512 B`."""
    unit, name = binary_unit(value)
    return f"{value:,.0f} B" if unit == 1 else minus(f"{value / unit:,.2f} {name}")


def binary_unit(value: float) -> tuple[int, str]:
    """Return (bytes per unit, name) of the largest binary unit not above `value` bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= unit:
            return unit, name
    return 1, "B"


def duration(seconds: float) -> str:
    """Elapsed time by its two largest units: `3 d 4 h`, `1 h 23 min`, `2 min 5 s`, `1.37 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit, name, below, below_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {below_name}"
    raise AssertionError("60 seconds or more have a unit above")


def hours(value: float) -> str:
    """Hours of devices, three significant digits: `12.4`, `0.0667`."""
    return f"{value:.3g}" if value < 1000 else count(value)


def minus(text: str) -> str:
    """Replace the hyphen of a negative number by a minus sign (U+2212)."""
    return text.replace("-", "\N{MINUS SIGN}")


def spoken(name: str) -> str:
    """Turn an identifier into words: `global_batch_size` becomes `global batch size`."""
    return name.replace("_", " ")


def listed_names(names: Sequence[str], *, limit: int = 8) -> str:
    """Return the first `limit` names, and how many more there are; `no files` for none."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix or "no files"


def thinned(values: list[float], *, limit: int) -> list[int]:
    """Return the positions of at most `limit` values: both ends, and the lowest and highest of each
    of `limit // 2 - 1` equal buckets, so that no spike disappears."""
    if len(values) <= limit:
        return list(range(len(values)))
    width = math.ceil(len(values) / (limit // 2 - 1))
    positions = {0, len(values) - 1}
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        positions |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return sorted(positions)

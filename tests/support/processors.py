"""Processors whose order of sums the numeric tests are run with: what ATen, MKL and oneDNN may use
of the instructions that this one has.

Usage: eval "$(python tests/support/processors.py COMMIT)" says the setting that the commit's hash
draws and exports it; a setting's name in place of the hash takes that one, and no argument prints
the names of all, one a line. It needs nothing beside Python."""

import sys
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """What libraries take for the newest instructions."""

    needs: frozenset[str]
    """Flags of /proc/cpuinfo: ATen does not look for them if it is told what to use."""
    variables: dict[str, str]


def _processor(needs: str, aten: str, mkl: str, onednn: str) -> Processor:
    variables = {
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "ONEDNN_MAX_CPU_ISA": onednn,
    }
    return Processor(frozenset(needs.split()), variables)


PROCESSORS = {
    "sse4": _processor("sse4_2", "default", "SSE4_2", "SSE41"),
    "avx2": _processor("avx2 fma", "avx2", "AVX2", "AVX2"),
    "avx512": _processor(
        "avx512f avx512bw avx512vl avx512dq fma", "avx512", "AVX512", "AVX512_CORE"
    ),
}
AS_IT_IS = {"as it is": Processor(frozenset(), {})}


def flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags in the text of /proc/cpuinfo; none of a processor that is not x86."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next(
        (frozenset(text.split()) for name, _, text in lines if name.strip() == "flags"), frozenset()
    )


def supported(found: frozenset[str]) -> dict[str, Processor]:
    """Return the settings by name for a processor with these flags."""
    return {name: x for name, x in PROCESSORS.items() if x.needs <= found} or AS_IT_IS


def drawn(commit: str, processors: dict[str, Processor]) -> str:
    """Return the name of the setting that a commit's hash (hex digits) draws."""
    return [*processors][int(commit, 16) % len(processors)]


def lines(name: str, processor: Processor) -> list[str]:
    """Return lines of a shell that say the setting and export it."""
    exports = [f"export {variable}={value}" for variable, value in processor.variables.items()]
    said = " ".join(f"{variable}={value}" for variable, value in processor.variables.items())
    return [f"echo 'Sums in the order of: {name} {said}'", *exports]


def main(arguments: list[str]) -> None:
    processors = supported(flags(CPUINFO.read_text() if CPUINFO.exists() else ""))
    if not arguments:
        print(*processors, sep="\n")
        return
    name = arguments[0] if arguments[0] in processors else drawn(arguments[0], processors)
    print(*lines(name, processors[name]), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

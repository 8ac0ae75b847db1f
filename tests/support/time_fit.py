"""How rates were fitted to measured steps (`tests.support.recorded_work`), and how well.

`python -m tests.support.time_fit` prints fitted and shipped rates, and writes the table of errors
anew into workflow/docs/predictions.md.
Each step is one equation for twenty-two rates, so the fit starts from the shipped
ones, is pulled to them, and a large error counts linearly."""

import math
from dataclasses import replace
from statistics import median, quantiles

import numpy as np
from scipy.optimize import least_squares

from tests.support.pages import DOCS, with_part
from tests.support.recorded_work import Step, measured_steps
from workflow.lib.planning.timing.rates import MEASURED, Rates

PAGE = DOCS / "predictions.md"
USUAL_ERROR, PULL = 0.03, 0.5
# Of all kinds of GPUs, and of each.
COMMON = (
    "gap_s", "launch_s", "prepared_launch_s", "collective_launch_s", "collective", "attention"
)  # fmt: skip
OWN = ("memory", "decoding", "host")
GROUPS = ("by graphs", "launched by Python", "with copies to the host")


def group_of(step: Step) -> str:
    if step.plan.offload_activations or step.plan.offload_layers:
        return GROUPS[2]
    return GROUPS[0] if step.plan.graphed else GROUPS[1]


def summary(steps: list[Step]) -> tuple[float, float, float]:
    """Return the median of the errors' sizes, what 90% are within, and the worst."""
    errors = [abs(step.error()) for step in steps]
    return median(errors), quantiles(errors, n=10, method="inclusive")[-1], max(errors)


def table() -> str:
    """Return how far predictions are off, in Markdown."""
    steps = measured_steps()
    groups = {name: [x for x in steps if group_of(x) == name] for name in GROUPS} | {"all": steps}
    lines = ["| steps | number | median | 90% within | worst |", "|---|---|---|---|---|"]
    for name, found in groups.items():
        cells = " | ".join(f"{x:.1%}" for x in summary(found))
        lines.append(f"| {name} | {len(found)} | {cells} |")
    return "\n".join(lines) + "\n"


def fitted(steps: list[Step]) -> dict[str, Rates]:
    """Return the rates of all measured kinds of GPUs that fit the steps best."""
    first = next(iter(MEASURED.values()))
    start = [*first.flops.values(), *(getattr(first, name) for name in COMMON)]
    start += [getattr(rates, name) for rates in MEASURED.values() for name in OWN]
    origin = np.log(start)

    def made(point: np.ndarray) -> dict[str, Rates]:
        values = iter(np.exp(point).tolist())
        flops = {kind: next(values) for kind in first.flops}
        common = {name: next(values) for name in COMMON}
        return {
            gpu: replace(rates, flops=flops, **common, **{name: next(values) for name in OWN})
            for gpu, rates in MEASURED.items()
        }

    def losses(point: np.ndarray) -> np.ndarray:
        rates = made(point)
        errors = [math.log1p(x.error(rates[x.gpu.name])) / USUAL_ERROR for x in steps]
        return np.array([*errors, *PULL * (point - origin)])

    return made(least_squares(losses, origin, loss="soft_l1", diff_step=1e-3, max_nfev=20).x)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(page, "errors", table()), encoding="utf-8")
    steps = measured_steps()
    for gpu, rates in fitted([x for x in steps if not x.plan.offload_layers]).items():
        print(gpu)
        for name in (*COMMON, *OWN):
            print(f"  {name}: {getattr(rates, name):.3g} ({getattr(MEASURED[gpu], name):.3g})")
        for kind, rate in rates.flops.items():
            print(f"  {kind}: {rate / 1e12:.3g}e12 ({MEASURED[gpu].flops[kind] / 1e12:.3g}e12)")
    for step in sorted(steps, key=lambda x: -abs(x.error())):
        print(f"{step.error():+.1%} {1e3 * step.measured_s:.1f} ms {step.label}")


if __name__ == "__main__":
    main()

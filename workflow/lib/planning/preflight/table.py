"""A forecast as tables for a terminal and a log."""

import io
import shutil

from rich.console import Console
from rich.table import Table

from workflow.lib.artifacts.preflight_record import BitCurve, Estimate, Forecast
from workflow.lib.planning.preflight.forecast import nearest_plans, plan_choices
from workflow.lib.step_plan.memory_options import in_words
from workflow.lib.system.number_formats import duration, spoken
from workflow.lib.system.units import GIB, MIB

METHODS = {
    "replay": "reserved beyond what is allocated, by a replay of the steps",
    "lines": "reserved beyond what is allocated",
}
WIDTH = 100  # columns, where the terminal has not fewer


def render(forecast: Forecast, *, run: str, host_origin: str | None = None) -> str:
    """Return a forecast's tables as plain text; host_origin: source of the amount of memory."""
    facts = Table("fact", "value")
    for row in _facts(forecast, host_origin=host_origin).items():
        facts.add_row(*row)
    curves = [_bits(forecast.bits)] if forecast.bits else []
    return _printed(_terms(forecast, run=run), _plans(forecast), *curves, facts)


def _printed(*tables: Table) -> str:
    columns = min(WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns)
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _terms(forecast: Forecast, *, run: str) -> Table:
    """Bytes by term in the peak phase, and the other bytes that must fit."""
    title = f"run {run}: memory of each process, phase {forecast.peak_phase}"
    table = Table(title=title, title_justify="left")
    table.add_column("term")
    table.add_column("size", justify="right")
    table.add_column("what it is")
    for term in sorted(forecast.terms, key=lambda term: -term.bytes):
        table.add_row(term.name, _size(term.bytes), term.explanation)
    table.add_section()
    slack = METHODS[forecast.method]
    for name, num_bytes, explanation in (
        ("peak", forecast.peak_bytes, "sum: the largest of the phases below"),
        ("allocator_slack", forecast.allocator_slack_bytes, slack),
        ("reserved", forecast.reserved_bytes, "what PyTorch takes from the device"),
        ("outside_allocator", forecast.outside_allocator_bytes, "CUDA context, communication"),
        ("margin", forecast.margin_bytes, "hardware.memory_margin_gib"),
        ("capacity", forecast.capacity_bytes, "what a process may take"),
    ):
        table.add_row(name, _size(num_bytes), explanation)
    return table


def _plans(forecast: Forecast) -> Table:
    """The chosen plan among its neighbours, a line each."""
    plans = forecast.candidates
    shown, columns = nearest_plans(plans), plan_choices(forecast)
    table = Table(title=f"plans: {len(shown)} of {len(plans)}", title_justify="left")
    for title in ("micro-batch", *columns, "peak memory", "time, % of chosen", "result"):
        table.add_column(title, justify="left" if title in (*columns, "result") else "right")
    for tried in shown:
        plan = tried.plan(forecast.plan)
        chosen = (in_words(plan, forecast.num_layers)[title] for title in columns)
        relative = f"{100 * tried.relative_time:.1f}"
        rows = f"{plan.micro_batch_size}{plan.sharers}"
        table.add_row(rows, *chosen, _size(tried.peak_bytes), relative, tried.why)
    return table


def _bits(curve: BitCurve) -> Table:
    """What 16 bits for the most sensitive linears take and win."""
    title = f"quantize.keep: auto, {curve.kept} of {curve.weights} linears in 16 bits"
    table = Table(title=title, title_justify="left", caption=curve.slower, caption_justify="left")
    for heading in ("in 16 bits, % of weights", "peak memory", "expected loss of 4 bits, nats"):
        table.add_column(heading, justify="right")
    table.add_column("result")
    for point in curve.points:
        share = f"{100 * point.share:.1f}"
        table.add_row(share, _size(point.peak_bytes), f"{point.nats:.4f}", point.verdict)
    return table


def summary(forecast: Forecast, *, run: str) -> str:
    """Return the facts of a run that fits, a line each."""
    facts = _facts(forecast, host_origin=None)
    taken, whole = _size(forecast.reserved_bytes), _size(forecast.capacity_bytes)
    return "\n".join(
        [
            f"run {run} fits: a process takes {taken} of {whole}, host memory "
            f"{facts['host memory']}",
            *(f"{name}: {facts[name]}" for name in ("plan", "time", "disk")),
        ]
    )


def _facts(forecast: Forecast, *, host_origin: str | None) -> dict[str, str]:
    """All other facts in words."""
    plan, time = forecast.plan, forecast.time
    rows = f"{plan.micro_batch_size}{plan.sharers}"
    rows += " (hardware.context_parallel)" if plan.sharers else ""
    parts = [f"{title}: {words}" for title, words in in_words(plan, forecast.num_layers).items()]
    phases = forecast.phases.items()
    host = _size(forecast.host_bytes)
    if forecast.host_capacity_bytes is not None:
        host += f" of {_size(forecast.host_capacity_bytes)}"
        host += f" ({host_origin})" if host_origin else ""
    disk = ", ".join(f"{name} {_size(size)}" for name, size in forecast.disk_bytes.items())
    if forecast.disk_free_bytes is not None:
        disk += f"; free {_size(forecast.disk_free_bytes)}"
    return {
        "verdict": spoken(forecast.verdict),
        "plan": f"{plan.processes} x {plan.device}, micro-batch {rows} x "
        f"accumulation {plan.accumulation_steps}, {plan.num_steps} steps, {plan.compute_dtype}; "
        f"{'; '.join(parts)}",
        "phases": ", ".join(f"{name} {_size(size)}" for name, size in phases),
        "host memory": host,
        "disk": disk,
        "time": _time(time),
        **({"spent on": _shares(time.parts_s)} if time.parts_s else {}),
        "predicted from": time.basis,
    }


def _time(time: Estimate) -> str:
    if time.step_s is None or time.total_h is None:
        return "not known"
    cost = "" if time.cost is None else f"cost {time.cost:,.2f}, "
    span = ""
    if time.step_range_s is not None:
        least_s, most_s = time.step_range_s
        span = f" ({duration(least_s)} to {duration(most_s)}, mostly by {time.range_due_to})"
    return (
        f"{duration(time.step_s)} a step{span}, {duration(3600 * time.total_h)} in all, {cost}"
        f"{time.tokens_per_s_per_process:,.0f} tokens/s per process"
    )


def _shares(parts: dict[str, float]) -> str:
    """Shares of a micro-batch's time, percent, the largest first; none below half a percent."""
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, name) for name, seconds in parts.items()), reverse=True)
    words = (f"{name.replace('_', ' ')} {share:.0%}" for share, name in shares if share >= 0.005)
    return ", ".join(words)


def _size(num_bytes: int) -> str:
    """Bytes in the unit that leaves three or four digits."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"

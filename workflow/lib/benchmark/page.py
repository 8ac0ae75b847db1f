"""The page and the figure of a benchmark, from its measurements: conditions, a table, ratios, and
what could not run.

Numbers are those of the measurements, formatted; every ratio is between rows of the same page.
"""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from workflow.lib.artifacts.benchmark_record import BenchmarkRow, MeasuredRow
from workflow.lib.report.paper_figures import COLORS, axes_of_rows, save_figure
from workflow.lib.settings.train import TrainConfig
from workflow.lib.system.number_formats import count, general, loss, share
from workflow.lib.system.units import GIB, MIB

DATE_CHARS = len("2026-11-21")
CONDITIONS = (
    "seq_len",
    "micro_batch_size",
    "accumulation",
    "documents",
    "rank",
    "steps",
    "layers",
    "vocab_size",
)
SHOWN_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "flash_attn",
    "accelerate",
    "trl",
    "liger_kernel",
)
SHOWN_CAUSE_CHARS = 240
CHECKPOINT_EVERY: int = TrainConfig.model_fields["checkpoint_every_steps"].default


def measured_rows(rows: Sequence[BenchmarkRow]) -> list[MeasuredRow]:
    """Return the rows that have a measurement."""
    return [MeasuredRow(**dict(row)) for row in rows if row.measured is not None]


def page_name(rows: Sequence[BenchmarkRow]) -> str:
    """Return `<model>_<hardware>_<date>`: the name of the page without its ending; the date is the
    newest row's.
    """
    plain = hardware(rows).lower()
    for word in ("nvidia ", "geforce ", " process"):
        plain = plain.replace(word, "")
    return f"{_slug(_model(rows))}_{_slug(plain.replace('x ', 'x', 1))}_{_date(rows)}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _model(rows: Sequence[BenchmarkRow]) -> str:
    sizes = common_sizes(rows)
    layers = f", {sizes['layers']} layers" if sizes["layers"] else ""
    cap = f", capped at {sizes['memory_cap_gib']:g} GiB" if sizes["memory_cap_gib"] else ""
    return f"{Path(sizes['model']).name}{layers}{cap}"


def _date(rows: Sequence[BenchmarkRow]) -> str:
    newest: str = max(row.provenance.created_utc for row in rows)
    return newest[:DATE_CHARS]


def common_sizes(rows: Sequence[BenchmarkRow]) -> dict[str, Any]:
    """Return of every size of the benchmark the value that most rows have."""
    return {key: statistics.mode(row.sizes[key] for row in rows) for key in rows[0].sizes}


def hardware(rows: Sequence[BenchmarkRow]) -> str:
    """Return what it ran on in words: `2x NVIDIA H200`; of several numbers of processes, all of
    them.
    """
    counts = "-".join(str(n) for n in sorted({row.processes for row in rows}))
    names = {name for row in rows for name in row.gpu_names}
    return f"{counts}x {' and '.join(sorted(names)) or 'CPU process'}"


def render_page(rows: Sequence[BenchmarkRow], *, figure: str) -> str:
    """Return the page in Markdown; figure: its file name."""
    done = measured_rows(rows)
    title = f"{_model(rows)}, {hardware(rows)}, {_date(rows)}"
    parts = [f"# {title}\n", _conditions(rows)]
    if done:
        parts += [
            _table(done),
            _ratios(done),
            _scaling(done),
            _memory(done),
            _profiles(done),
            _checkpoints(done),
            f"![Speed and memory of every case]({figure})\n",
        ]
    parts += [_causes([row for row in rows if not row.measured]), _repeat()]
    return "\n".join(part for part in parts if part)


def _conditions(rows: Sequence[BenchmarkRow]) -> str:
    sizes = common_sizes(rows)
    known = [f"{name} {sizes[name]}" for name in CONDITIONS if sizes[name] is not None]
    packages = rows[0].provenance.packages
    versions = [f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages]
    commit = rows[0].provenance.commit
    checked = (
        "Every gathered tensor was compared with the checkpoint before the steps."
        if sizes["check_bytes"]
        else "The byte check was left out."
    )
    return (
        f"Shape of `{sizes['model']}`, random weights and rows, every token trained. "
        f"{', '.join(known)}; where a case "
        f"differs, it says so. Speed: of the last two thirds of the steps together. {checked}\n"
        f"{', '.join(versions)}; commit {commit}.\n"
    )


def _table(rows: Sequence[MeasuredRow]) -> str:
    head = (
        "| case | processes | attention | tokens/s per process | model FLOP utilisation | peak "
        "allocated | predicted | "
        "peak reserved | host peak | loss, first to last | gradient norm, first to last |"
    )
    lines, common = [head, "|---" * 11 + "|"], common_sizes(rows)
    for row in rows:
        measured, predicted = row.measured, row.predicted
        on_gpu, without = measured.allocated_bytes > 0, measured.graphs_off
        cells = [
            _what(row, common),
            str(row.processes),
            measured.attention + (f", no CUDA graphs ({without})" if without else ""),
            count(measured.tokens_per_s_per_process),
            share(measured.model_flops_utilisation),
            gib(measured.allocated_bytes) if on_gpu else "-",
            gib(predicted.peak_bytes) if predicted else "-",
            gib(measured.reserved_bytes) if on_gpu else "-",
            gib(measured.host_bytes),
            _ends(measured.losses, loss),
            _ends(measured.grad_norms, general),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        "\nModel FLOP utilisation: 4 FLOP per weight and token, with head and attention, over the "
        "rate at which the same process "
        f"multiplied matrices of the model's own shapes ({_gemm(rows)}). Predicted: allocated, on "
        "a CPU the whole process.\n"
    )
    return "\n".join(lines) + "\n" + note


def _what(row: BenchmarkRow, common: dict[str, Any]) -> str:
    """Return a case in words, with the sizes that are its own."""
    own = [f"{key} {value}" for key, value in row.sizes.items() if value != common[key]]
    return f"`{row.case}`: {row.title}" + (f" ({', '.join(own)})" if own else "")


def gib(num_bytes: float) -> str:
    """Return bytes in GiB, two decimals, or in MiB below a tenth of one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / MIB:.0f} MiB"


def _ends(values: Sequence[float], spelled: Any) -> str:
    return f"{spelled(values[0])} -> {spelled(values[-1])}"


def _gemm(rows: Sequence[MeasuredRow]) -> str:
    rates = [row.measured.gemm_flops_per_s / 1e12 for row in rows]
    return f"{min(rates):.3g} to {max(rates):.3g} TFLOP/s"


def _ratios(rows: Sequence[MeasuredRow]) -> str:
    """Every case over every peer of as many processes: speed, and memory allocated and reserved at
    the peak.
    """
    peers = [row for row in rows if row.peer]
    ours = [row for row in rows if not row.peer]
    if not peers or not ours:
        return ""
    head = (
        "| times the peer's: speed, peak allocated, peak reserved | "
        + " | ".join(f"`{_label(peer)}`" for peer in peers)
        + " |"
    )
    lines = [head, "|---" * (len(peers) + 1) + "|"]
    lines += [
        f"| `{_label(row)}` | " + " | ".join(_over(row, peer) for peer in peers) + " |"
        for row in ours
    ]
    return "\n".join(lines) + "\n"


def _over(row: MeasuredRow, peer: MeasuredRow) -> str:
    """Return the ratios of a case to a peer, or a dash if they had different numbers of
    processes.
    """
    if row.processes != peer.processes:
        return "-"
    mine, theirs = row.measured, peer.measured
    kinds = ("allocated_bytes", "reserved_bytes") if theirs.allocated_bytes else ("host_bytes",)
    names = ("tokens_per_s_per_process", *kinds)
    compared = [getattr(mine, name) / getattr(theirs, name) for name in names]
    return ", ".join(f"{ratio:.2f}" for ratio in compared)


def _scaling(rows: Sequence[MeasuredRow]) -> str:
    """Weak scaling: tokens/s per process of more processes over that of the fewest."""
    lines = []
    for name in dict.fromkeys(row.case for row in rows):
        same = sorted((row for row in rows if row.case == name), key=lambda row: row.processes)
        first = same[0].measured.tokens_per_s_per_process
        for row in same[1:]:
            ratio = share(row.measured.tokens_per_s_per_process / first)
            lines.append(f"| `{name}` | {same[0].processes} -> {row.processes} | {ratio} |")
    head = "| case | processes | weak scaling: speed per process that is kept |\n|---|---|---|\n"
    return head + "\n".join(lines) + "\n" if lines else ""


def _memory(rows: Sequence[MeasuredRow]) -> str:
    """How far the prediction was from what was measured on GPUs."""
    pairs = [
        (row.predicted.peak_bytes / row.measured.allocated_bytes - 1, row.case)
        for row in rows
        if row.predicted and row.measured.allocated_bytes
    ]
    if not pairs:
        return ""
    error, case = max(pairs, key=lambda pair: abs(pair[0]))
    return (
        f"Predicted against measured allocation: at most {100 * error:+.1f}% (`{case}`), "
        f"{len(pairs)} cases.\n"
    )


def _profiles(rows: Sequence[MeasuredRow]) -> str:
    """Where the time of a step goes, in milliseconds, of the cases that were profiled."""
    profiles = {
        _label(row): row.measured.profile
        for row in rows
        if row.measured.profile and row.measured.profile.kinds
    }
    if not profiles:
        return ""
    kinds = list(dict.fromkeys(kind for profile in profiles.values() for kind in profile.kinds))
    lines = [
        "| one profiled step, ms | all | " + " | ".join(kinds) + " | GPU idle |",
        "|---" * (len(kinds) + 3) + "|",
    ]
    for label, profile in profiles.items():
        seconds = [
            profile.step_s,
            *(profile.kinds.get(kind, 0.0) for kind in kinds),
            profile.idle_s,
        ]
        lines.append(f"| `{label}` | " + " | ".join(f"{1000 * s:.1f}" for s in seconds) + " |")
    note = "\nKinds on several streams overlap, so they may add up to more than the step.\n"
    return "\n".join(lines) + "\n" + note


def _checkpoints(rows: Sequence[MeasuredRow]) -> str:
    """What a checkpoint costs, of the cases that measured it."""
    costs = {_label(row): row.measured.checkpoint for row in rows}
    lines = [
        f"| `{label}` | {gib(cost.bytes)} | {cost.step_s:.3f} | {cost.cost_s:.3f} | "
        f"{cost.still_s:.3f} "
        f"| {share(max(0.0, cost.cost_s) / (CHECKPOINT_EVERY * cost.step_s))} |"
        for label, cost in costs.items()
        if cost
    ]
    if not lines:
        return ""
    head = (
        "| checkpoints | size | a step without, s | a checkpoint adds, s | of that training stands "
        "still, s "
        f"| share of the time with one every {CHECKPOINT_EVERY} steps |\n|---|---|---|---|---|---|"
    )
    note = (
        "\nMedians of alternating blocks of steps with and without one; it is waited for until "
        "it is on disk, as training does not.\n"
    )
    return "\n".join([head, *lines]) + "\n" + note


def _causes(rows: Sequence[BenchmarkRow]) -> str:
    if not rows:
        return ""
    lines = ["| not measured | processes | why |", "|---|---|---|"]
    for row in rows:
        cause = str(row.cause).replace("|", "\\|")[:SHOWN_CAUSE_CHARS]
        lines.append(f"| `{row.case}`: {row.title} | {row.processes} | {cause} |")
    return "\n".join(lines) + "\n"


def _repeat() -> str:
    return (
        "Repeat: `snakemake --cores all benchmark` with these settings in section `benchmark`; "
        "every number of this page, and "
        "more, stands in `measurements.jsonl`.\n"
    )


def benchmark_figure(rows: Sequence[BenchmarkRow]) -> Figure:
    """Return tokens/s per process, and predicted beside measured peak memory, a row per case."""
    done = measured_rows(rows)
    figure, (speed, memory) = axes_of_rows([_label(row) for row in done], columns=2)
    places = range(len(done))
    speed.barh(places, [row.measured.tokens_per_s_per_process for row in done], color=COLORS[0])
    speed.set_xlabel("tokens/s per process")
    used = [(row.measured.allocated_bytes or row.measured.host_bytes) / GIB for row in done]
    memory.barh([n - 0.2 for n in places], used, height=0.4, color=COLORS[0], label="measured")
    shown = [(n, row.predicted.peak_bytes / GIB) for n, row in enumerate(done) if row.predicted]
    if shown:
        memory.barh(
            [n + 0.2 for n, _ in shown],
            [size for _, size in shown],
            height=0.4,
            color=COLORS[4],
            label="predicted",
        )
    memory.set_xlabel("peak memory, GiB")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _label(row: BenchmarkRow) -> str:
    return f"{row.case} x{row.processes}"


def write_figure(path: Path, rows: Sequence[BenchmarkRow]) -> None:
    """Write the figure as PNG."""
    save_figure(path, benchmark_figure(rows))

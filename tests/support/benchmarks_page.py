"""The table of speed and memory `workflow/docs/benchmarks.csv`, from the stored measurements of
GPUs: of each case, on whatever GPU, the newest line.

`python -m tests.support.benchmarks_page` writes it anew."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.measurements import all_lines
from tests.support.pages import DOCS, csv_text
from workflow.lib.system.units import GIB

TABLE = DOCS / "benchmarks.csv"
SINCE = "2026-11-25"  # older lines are of an engine without today's kernels
STEPS = 6  # of fewer the memory alone was asked
HEAD = ("model", "layers", "GPUs", "how", "tokens/s per GPU", "GiB", "commit", "date")
PLAIN = {"micro_batch_size": 2, "seq_len": 2048, "rank": 16, "documents": 1, "vocab_size": None}
# Of a line's sizes; some are of earlier benchmarks.
NO_PART = ("steps", "check_bytes", "profile", "checkpoint_pairs")
WORDS = {
    "micro_batch_size": "rows",
    "seq_len": "tokens a row",
    "rank": "rank",
    "documents": "documents a row",
    "vocab_size": "vocabulary",
}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the table of these lines of measurements."""
    return csv_text([HEAD, *_rows(lines)])


def newest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {}
    for line in sorted(lines, key=_date):
        if line["measured"] and _date(line) >= SINCE and line["sizes"]["steps"] >= STEPS:
            found[json.dumps(_case(line), sort_keys=True)] = line
    return sorted(found.values(), key=_order)


def _date(line: dict[str, Any]) -> str:
    return str(line["versions"]["created_utc"])


def _case(line: dict[str, Any]) -> list[Any]:
    sizes = {k: v for k, v in line["sizes"].items() if k not in NO_PART}
    return [line["processes"], sizes, line["settings"], line["peer"]]


def _order(line: dict[str, Any]) -> tuple[Any, ...]:
    sizes = line["sizes"]
    return (sizes["model"], sizes["layers"] or 0, _gpus(line), line["peer"] is not None, _how(line))


def _rows(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for line in newest(lines):
        sizes, measured = line["sizes"], line["measured"]
        yield (
            sizes["model"].split("/")[-1],
            sizes["layers"] or "all",
            _gpus(line),
            _how(line),
            f"{measured['tokens_per_s_per_process']:.0f}",
            f"{measured['allocated_bytes'] / GIB:.2f}",
            line["versions"]["commit"],
            _date(line)[:10],
        )


def _gpus(line: dict[str, Any]) -> str:
    cap = line["sizes"]["memory_cap_gib"]
    name = next(kind for kind in ("H100", "H200") if kind in line["gpu_names"][0])
    return f"{line['processes']}x{name}" + (f" held to {cap} GiB" if cap else "")


def _how(line: dict[str, Any]) -> str:
    """Say what differs from bf16 with recomputation, 2 rows of 2,048 tokens, and rank 16."""
    sizes = line["sizes"]
    other = [f"{WORDS[key]}: {sizes[key]}" for key, usual in PLAIN.items() if sizes[key] != usual]
    settings = {k: v for section in line["settings"].values() for k, v in section.items()}
    if line["peer"] is not None:
        peer = line["peer"]
        liger = " + Liger" if peer["liger"] else ""
        kept = "recomputation" if peer["checkpointing"] else "all kept"
        objective = [f"objective: {settings['objective']}"] if "objective" in settings else []
        return ", ".join([f"TRL + {peer['strategy']}{liger}", kept, *objective, *other])
    recomputed = settings.pop("activation_checkpointing", True)
    words = [
        str(settings.pop("products", settings.pop("matmul_dtype", "bf16"))),
        "all kept" if recomputed is False else "recomputation",
    ]
    if not isinstance(recomputed, bool):
        share = f"1 of {recomputed}" if recomputed >= 1 else f"{recomputed:.1%}"
        words[1] = f"{share} of the layers recomputed"
    return ", ".join([*words, *(f"{k}: {v}" for k, v in sorted(settings.items())), *other])


if __name__ == "__main__":
    TABLE.write_text(table(all_lines()), encoding="utf-8")

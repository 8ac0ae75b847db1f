"""The table `workflow/docs/bits.csv` and its figure: what 4 bits of the base cost after training,
from the stored lines of `benchmark_bits`.

`python -m tests.support.bits_page` writes both anew; with the name of a model and a file of lines
it stores these in place of the model's."""

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.pages import DOCS, csv_text
from workflow.benchmark.bits_after_training import HEAD, table

MEASURED = Path(__file__).parents[1] / "benchmark" / "bits_after_training.jsonl.gz"
TABLE, FIGURE = DOCS / "bits.csv", DOCS / "images" / "bits.svg"
STYLE = (
    "text{font:13px sans-serif;fill:#333}path{stroke-width:2}.axis{stroke:#999}"
    ".text0{fill:#0b6bcb;stroke:#0b6bcb}.text1{fill:#c2410c;stroke:#c2410c}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
LEFT, WIDTH, ROW = 190, 720, 34  # pixels
Line = dict[str, Any]


def measured() -> list[Line]:
    with gzip.open(MEASURED, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def store(model: str, lines: Path) -> None:
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    kept = [row for row in measured() if row["model"] != model] if MEASURED.exists() else []
    text = "".join(json.dumps(row) + "\n" for row in [*kept, *(x | {"model": model} for x in rows)])
    MEASURED.write_bytes(gzip.compress(text.encode(), mtime=0))


def written() -> dict[Path, str]:
    """Return the text of both files."""
    lines = table(measured())
    return {TABLE: csv_text(lines), FIGURE: "\n".join([*figure(lines[1:]), ""])}


def figure(lines: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the lines of an SVG: by model, base and text, nats above 16 bits after training, with
    intervals."""
    drawn = [dict(zip(HEAD[:12], line, strict=False)) for line in lines]
    drawn = [line for line in drawn if line["training"] == "after" and line["more than 16 bits"]]
    models = {x["model"]: [y for y in drawn if y["model"] == x["model"]] for x in drawn}
    texts = list(dict.fromkeys(line["text"] for line in drawn))
    height = ROW * sum(len({line["base"] for line in own}) + 2 for own in models.values()) + ROW
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    yield f"<style>{STYLE}</style>"
    for number, text in enumerate(texts):
        yield f'<circle class="text{number}" cx="{LEFT + 90 * number}" cy="{height - 14}" r="4"/>'
        yield _text(LEFT + 90 * number + 10, height - 10, text)
    top = 0
    for model, own in models.items():
        yield from _panel(model, own, texts, top)
        top += ROW * (len({line["base"] for line in own}) + 2)
    yield "</svg>"


def _panel(model: str, own: Sequence[Line], texts: Sequence[str], top: int) -> Iterator[str]:
    bases = list(dict.fromkeys(line["base"] for line in own))
    low = min(0.0, *(float(line["from"]) for line in own))
    scale = (WIDTH - LEFT - 70) / (max(float(line["to"]) for line in own) - low)
    zero, bottom = LEFT - low * scale, top + ROW * (len(bases) + 1)
    yield _text(4, top + 20, f"{model}: nats per token above 16 bits, after training")
    yield f'<path class="axis" d="M{zero:.1f} {top + ROW - 4}V{bottom}"/>'
    yield _text(zero - 3, bottom + 14, "0")
    for line in own:
        y = top + ROW * (bases.index(line["base"]) + 1) + 8 + 12 * texts.index(line["text"])
        value, *ends = (zero + float(line[x]) * scale for x in ("more than 16 bits", "from", "to"))
        kind = f'class="text{texts.index(line["text"])}"'
        yield f'<path {kind} d="M{ends[0]:.1f} {y}H{ends[1]:.1f}"/>'
        yield f'<circle {kind} cx="{value:.1f}" cy="{y}" r="4"/>'
        yield _text(WIDTH - 50, y + 4, f"{float(line[HEAD[8]]):.3f}")
    for number, base in enumerate(bases):
        yield _text(4, top + ROW * (number + 1) + 18, base)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{text}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", nargs="*", help="model, and a file of its lines")
    if new := parser.parse_args().new:
        store(new[0], Path(new[1]))
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")

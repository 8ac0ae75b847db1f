"""Documents by length, train beside held-out, as shares: a figure per tokens folder."""

import itertools
from typing import Any

from workflow.lib.artifacts.manifest_record import Histogram, Manifest
from workflow.lib.report.figures import Figure


def length_figure(manifest: Manifest, *, number: int) -> Figure | None:
    """Return the histogram of tokens folder `number`; None if its manifest has none."""
    splits = {"train": manifest.splits.train, "held out": manifest.splits.heldout}
    histograms = {name: split.length_histogram for name, split in splits.items()}
    traces = [_bars(name, histogram) for name, histogram in histograms.items() if histogram]
    if not traces:
        return None
    return Figure(
        f"lengths-{number}",
        "Length of the documents",
        "Share of a split's documents by length in tokens, before any cut.",
        f"lengths-{number}-numbers",
        traces,
        {
            "barmode": "overlay",
            "height": 300,
            "margin": {"l": 12, "r": 12, "t": 10, "b": 44},
            "hovermode": "closest",
            "showlegend": len(traces) > 1,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {"title": {"text": "tokens per document"}},
            "yaxis": {
                "title": {"text": "share of documents"},
                "automargin": True,
                "tickformat": ".0%",
                "rangemode": "tozero",
            },
        },
    )


def _bars(name: str, histogram: Histogram) -> dict[str, Any]:
    edges, total = histogram.edges, max(1, sum(histogram.counts))
    widths = [high - low for low, high in itertools.pairwise(edges)]
    return {
        "type": "bar",
        "name": name,
        "meta": {"train": "series-1", "held out": "series-2"}[name],
        "opacity": 0.6,
        "x": edges[:-1],
        "y": [number / total for number in histogram.counts],
        "width": widths,
        "offset": 0,
        "customdata": [
            f"{low} to {high - 1} tokens: {number:,}"
            for low, high, number in zip(edges, edges[1:], histogram.counts, strict=False)
        ],
        "hovertemplate": "%{customdata}",
    }

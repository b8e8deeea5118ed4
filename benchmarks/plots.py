"""Plots from the figures of a run, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnspec.text.diagnostics import time_text
from benchmarks.cases import ETA_TARGETS

Figures = Mapping[str, Any]


def plots(figures: Figures) -> Iterator[tuple[str, Any]]:
    """Names and matplotlib figures of the parts that were measured."""
    if "efficiency" in figures:
        yield "efficiency", _bars(figures["efficiency"])
    if "growth" in figures:
        yield "growth", _lines(figures["growth"])


def _bars(part: Figures) -> Any:
    """Both efficiencies of every pattern, with the targets of their means."""
    from matplotlib.figure import Figure

    rows = part["rows"]
    figure = Figure(figsize=(8, 0.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours = {"forward": "#3465a4", "both": "#f57900"}
    labels = {"forward": "forward", "both": "forward and backward"}
    for place, (mode, colour) in enumerate(colours.items()):
        heights = [at + 0.4 * place - 0.2 for at in range(len(rows))]
        values = [row[f"eta_{mode}"] for row in rows]
        axes.barh(heights, values, 0.38, color=colour, label=labels[mode])
        axes.axvline(ETA_TARGETS[mode], color=colour, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"η at n = {part['n']:,}; dashed: targets for the geometric means")
    axes.legend(frameon=False)
    return figure


def _lines(part: Figures) -> Any:
    """Time against length on logarithmic axes, with the fitted exponents."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(part["rows"]):
        fitted = "" if row["exponent"] is None else f", $n^{{{row['exponent']:.2f}}}$"
        axes.plot(
            row["lengths"],
            row["seconds"],
            marker="osD^vP*X"[place % 8],
            color=f"C{place % 10}",
            linestyle="-" if place < 10 else "--",
            label=row["name"] + fitted,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(part["lengths"]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    axes.set_xlabel("n")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: time_text(seconds)))
    axes.set_ylabel("one call, forward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Write the plots as SVG; the same figures give the same bytes."""
    import matplotlib

    written = []
    with matplotlib.rc_context({"svg.hashsalt": "attnspec", "svg.fonttype": "none"}):
        for name, figure in plots(figures):
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            written.append(path)
    return written

"""The figures of a run as Markdown: all of them, and those of other machines behind them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnspec.backends.planner import RENAMED
from attnspec.text.diagnostics import time_text
from benchmarks.cases import ETA_TARGETS
from benchmarks.lengths import CHANGED, MORE, TIMES
from benchmarks.plots import plots
from benchmarks.shapes import CEILING, MEAN, MODES

RESULTS = Path(__file__).resolve().parent / "results"

Figures = Mapping[str, Any]


def page(figures: Figures) -> str:
    """Plots and tables, and the tables of `results/NAME/bench.json`, measured elsewhere."""
    images = [f"![{name}](results/{name}.svg)" for name, _ in plots(figures)]
    others = [
        f"## A second machine: {path.parent.name}\n\n"
        + tables(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("*/bench.json"))
    ]
    return "\n\n".join([*images, tables(figures), *others])


def tables(figures: Figures) -> str:
    """All parts that were measured, as Markdown."""
    made = [table(figures[name]) for name, table in TABLES.items() if name in figures]
    return "\n\n".join([*made, _conditions(figures)])


def _efficiency(part: Figures) -> str:
    dense, summary = part["dense"], part["summary"]
    rows = [
        [
            row["name"],
            f"{row['edges'] / part['n']:,.0f}",
            _backends(row),
            time_text(row["forward"]["median"]),
            f"{row['eta_forward']:.2f}",
            time_text(row["both"]["median"]),
            f"{row['eta_both']:.2f}",
            time_text(row["predicted"]),
        ]
        for row in part["rows"]
    ]
    for column, function in (("geometric mean", "mean"), ("least", "least")):
        if f"{function}_forward" in summary:
            forward, both = (f"{summary[f'{function}_{mode}']:.2f}" for mode in ETA_TARGETS)
            label = f"**{column}**, without scattered graphs"
            rows.append([label, "", "", "", f"**{forward}**", "", f"**{both}**", ""])
    return _section(
        f"Edge efficiency, n = {part['n']:,}",
        f"Dense attention takes {time_text(dense['forward']['median'])} forward and "
        f"{time_text(dense['both']['median'])} with gradients. Targets for the geometric mean: "
        f"{ETA_TARGETS['forward']} and {ETA_TARGETS['both']}.",
        "pattern | keys per query | backend | forward | η, forward | with gradients"
        " | η, with gradients | predicted forward",
        rows,
    )


def _shapes(part: Figures) -> str:
    rows = [
        [
            row["name"],
            row["shape"],
            "padded" if row["padded"] else "",
            _backends(row),
            *(
                cell
                for mode in MODES
                for cell in (
                    time_text(row[mode]["ours"]["median"]),
                    time_text(row[mode]["torch"]["median"]),
                    f"{row[mode]['ratio']:.2f}×",
                )
            ),
        ]
        for row in part["rows"]
    ]
    said = [
        f"\n\n{mode.capitalize()}: the geometric mean is {found['mean']:.2f}×, the worst row"
        f" {found['most']:.2f}×; {found['above']} of {found['rows']} rows are above {CEILING}×."
        for mode, found in part["summary"].items()
    ]
    return _section(
        "Common shapes: samples × heads × positions",
        "Compared with torch's own best call for the same pairs: without a mask, with `is_causal`,"
        " or with a boolean mask made beforehand. The ratio is our time over torch's. Targets:"
        f" no row above {CEILING}×, a geometric mean of at most {MEAN}×.{''.join(said)}",
        "pattern | shape | | backend | forward | torch | ratio | training | torch | ratio",
        rows,
    )


def _lengths(part: Figures) -> str:
    summary = part["summary"]
    lengths = sorted({row["n"] for row in part["rows"]})
    rows = []
    for n in lengths:
        here = [row for row in part["rows"] if row["n"] == n]
        worst = max(here, key=lambda row: row["first"] - TIMES * row["later"])
        first, later = (statistics.median(row[name] for row in here) for name in ("first", "later"))
        met = sum(row["first"] <= TIMES * row["later"] + MORE for row in here)
        told = f"{worst['name']}, {time_text(worst['first'])} and {time_text(worst['later'])}"
        rows.append([f"{n:,}", time_text(first), time_text(later), f"{met} of {len(here)}", told])
    changed = [
        [
            *(row["name"], row["mode"], f"{row['calls']:,}", str(row["lengths"])),
            *(time_text(row["whole"]), time_text(row["steady"]), _over(row)),
        ]
        for row in part["changing"]
    ]
    kept = "met" if summary["excess"] <= 0 else "missed"
    first_calls = _section(
        "The first call at a new length, specs of the zoo",
        f"Target: the median first call takes at most {TIMES:g} times the median later call, plus"
        f" {time_text(MORE)}. It is {kept}.",
        "n | first call, median | later, median | specs that meet it | worst spec, first and later",
        rows,
    )
    drawn = _section(
        "Another length for each call",
        f"Each call has a random length up to {max(lengths):,}. The last column compares it with"
        " later calls at the same lengths. Forward: one sample, 4 heads. Training: two samples, 12"
        f" heads. Target in training: at most {CHANGED:g}×; there is none for forward.",
        "pattern | | calls | lengths | all calls | later calls | ratio",
        changed,
    )
    return f"{first_calls}\n\n{drawn}"


def _over(row: Figures) -> str:
    return f"{row['whole'] / row['steady']:.2f}×"


def _growth(part: Figures) -> str:
    lengths = part["lengths"]
    rows = []
    for row in part["rows"]:
        seconds = dict(zip(row["lengths"], row["seconds"], strict=True))
        times = [time_text(seconds[n]) if n in seconds else "left out" for n in lengths]
        fitted = ("exponent", "exponent_edges", "exponent_gathered")
        exponents = [_exponent(row[key]) for key in fitted]
        rows.append([row["name"], *times, *exponents, f"≤ {row['target']:g}"])
    heads = " | ".join(f"{n:,}" for n in lengths)
    return _section(
        "Growth of the forward time with n",
        "Exponents are fitted to the logarithms. A length is left out if a call would take too "
        "long. Exponents below 1 show fixed costs at short lengths. Scattered graphs read keys "
        'from slower memory as n grows; "of reading keys" is the exponent of these reads alone. '
        "Compare times within one table only.",
        f"pattern | {heads} | exponent | of the pairs | of reading keys | target",
        rows,
    )


TABLES: dict[str, Callable[[Figures], str]] = {
    "efficiency": _efficiency,
    "shapes": _shapes,
    "lengths": _lengths,
    "growth": _growth,
}
"""A table, or two, for each part."""


def _conditions(figures: Figures) -> str:
    """Where and with what the parts were measured; parts of one run share a line."""
    shared: dict[str, list[str]] = {}
    for name in TABLES:
        if name in figures:
            where, what = figures[name]["machine"], figures[name]["versions"]
            line = (
                f"{where['cores']} {where['architecture']} cores with "
                f"{where['vector_instructions']}, {where['threads']} threads, {where['system']}; "
                + ", ".join(f"{package} {found}" for package, found in what.items())
            )
            shared.setdefault(line, []).append(name)
    if len(shared) == 1:
        return f"({next(iter(shared))}.)"
    return "\n\n".join(f"({', '.join(names)}: {line}.)" for line, names in shared.items())


def _section(title: str, text: str, head: str, rows: Sequence[Sequence[str]]) -> str:
    columns = head.count("|") + 1
    lines = [f"### {title}", "", text, "", f"| {head} |", "|:--" + "|--:" * (columns - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _backends(row: Figures) -> str:
    # figures are older than some names
    return ", ".join(dict.fromkeys(RENAMED.get(name, name) for name in row["backends"]))


def _exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

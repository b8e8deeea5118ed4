"""Reports as text, in colour on a terminal, and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich.text import Text

from attnspec.analysis.counting import graph_heads
from attnspec.analysis.quality import Figure, Unknown
from attnspec.graphs.bind import extents_of
from attnspec.graphs.stack import TooMuch
from attnspec.text.diagnostics import count_of, from_to

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Entry, Inquiry

MOST_GRAPHS = 8
"""The most different graphs whose counts are printed one by one."""

MOST_NAMED = 3
"""Up to so many figures that are not known are named one by one."""

GROUPS = {
    "reads": "Pairs",
    "decides": "Data-dependent choices",
    "grows": "Growth",
    "reaches": "Reach",
    "mixes": "Mixing, pairs in both directions",
    "costs": "Cost of one layer, forward",
    "generation": "Memory of generation",
}

_TITLE, _NOTE, _UNKNOWN = "bold", "dim", "dim"
_QUALITY = {"exact": "green", "bound": "yellow", "estimate": "yellow"}

_UNITS = ("", "k", "M", "G", "T", "P")


def page(report: Inquiry, names: Sequence[str] | None = None) -> Text:
    """The whole report: one line for each figure, with its quality and what is to be said of it."""
    chosen = report.default_names if names is None else names
    text = Text()
    text.append(report.program.name, _TITLE)
    text.append(f"  {_about(report)}\n")
    for group, title in GROUPS.items():
        entries = [e for e in report.entries.values() if e.group == group and e.name in chosen]
        figures = [(entry, report.figure(entry.name)) for entry in entries]
        reasons = {f.reason for _, f in figures if isinstance(f, Unknown)}
        if not figures or (group == "generation" and reasons == {"the spec is not causal"}):
            continue
        text.append(f"\n{title}\n", _TITLE)
        if len(reasons) == 1 and all(isinstance(f, Unknown) for _, f in figures):
            text.append(f"  not known: {reasons.pop()}\n", _UNKNOWN)
            continue
        _append_group(text, figures, report)
    if names is None:
        _append_graphs(text, report)
        if report.on_request:
            text.append(
                f"\nnot computed at this length unless asked for: {', '.join(report.on_request)}\n",
                _NOTE,
            )
    text.rstrip()
    return text


def _about(report: Inquiry) -> str:
    program = report.program
    parts = [report.lengths]
    grid = extents_of(program, report.n)
    if grid:
        parts.append(f"grid {' x '.join(str(extent) for extent in grid)}")
    if program.layer_count > 1:
        parts.append(f"{program.layer_count} layers")
    heads = report.shape.heads or 1
    alike = program.heads is None and heads == 1
    parts.append("one head for all" if alike else count_of(heads, "head"))
    parts.append(f"size {report.shape.head_dim}")
    if report.shape.batch > 1:
        parts.append(count_of(report.shape.batch, "sample"))
    return ", ".join(parts)


@dataclass
class _Line:
    """A figure as it is printed."""

    title: str
    kind: str
    figure: Figure[Any] | Unknown
    value: str


def _append_group(
    text: Text, found: list[tuple[Entry[Any], Figure[Any] | Unknown]], report: Inquiry
) -> None:
    by_name = {e.name: _Line(e.title, e.kind, f, value_of(e, f)) for e, f in found}
    lines = _shortened(by_name)
    titles = max(len(line.title) for line in lines)
    short = [len(line.value) for line in lines if line.kind != "words"]
    width = max(short, default=0)
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if isinstance(line.figure, Unknown):
            reasons.setdefault(line.figure.reason, []).append(line.title)
            continue
        first, *others = line.value.splitlines() or [""]
        text.append(f"  {line.title:<{titles}}  {first:<{width}}")
        for other in others:
            text.append(f"\n{' ' * (titles + 4)}{other}")
        text.append("  ")
        text.append(line.figure.quality, _QUALITY[line.figure.quality])
        if line.figure.note:
            text.append(f"  {line.figure.note}", _NOTE)
        text.append("\n")
    for reason, names in reasons.items():
        what = "all else" if len(names) > MOST_NAMED else ", ".join(names)
        text.append(f"  not known: {what}: {reason}\n", _UNKNOWN)


def _shortened(by_name: dict[str, _Line]) -> list[_Line]:
    """The most, the fewest and the mean on one line; what follows from another line left out."""
    for most, fewest, mean, title in (
        ("degree", "min_degree", "mean_degree", "keys of a query"),
        ("graph_degree", "graph_min_degree", "", "keys of a query there"),
        ("readers", "min_readers", "", "readers of a key"),
    ):
        both = [by_name[name] for name in (most, fewest) if name in by_name]
        if len(both) < 2 or any(isinstance(line.figure, Unknown) for line in both):
            continue
        high, low = both
        if high.value != low.value:
            high.value = f"{low.value} to {high.value}"
            if mean in by_name:
                high.value += f", mean {by_name[mean].value}"
        high.title = title
        for name in (fewest, mean):
            by_name.pop(name, None)
    if "empty_rows" in by_name:
        by_name.pop("rows_nonempty", None)
    return list(by_name.values())


def _append_graphs(text: Text, report: Inquiry) -> None:
    """The counts of each different graph, where there are several."""
    try:
        graphs = graph_heads.distinct(report)
    except (Unknown, TooMuch):
        return
    if len(graphs) < 2:
        return
    text.append("\nHeads\n", _TITLE)
    rows = [("", "pairs", "density", "keys of a query", "readers of a key")]
    for where, counts in graphs[:MOST_GRAPHS]:
        keys = from_to(counts.min_degree, counts.degree)
        readers = from_to(counts.min_readers, counts.readers)
        rows.append((where, f"{counts.edges:,}", _share(counts.density), keys, readers))
    text.append("\n".join(_aligned(rows)) + "\n")
    if len(graphs) > MOST_GRAPHS:
        text.append(f"  and {len(graphs) - MOST_GRAPHS:,} more\n", _NOTE)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(["", f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines


# --- several reports ------------------------------------------------------------------------------


def table(reports: Sequence[Inquiry], names: Sequence[str] | None = None) -> Text:
    """Several reports side by side: a row for each figure, a column for each report.

    What is not exact is marked, what is not known left out.
    """
    if names is None:
        # what is soon found for all of them
        names = max(reports, key=lambda report: report.length).default_names
    several = len({report.program.name for report in reports}) > 1
    rows: list[Sequence[str]] = [["", *(report.lengths for report in reports)]]
    if several:
        rows.insert(0, ["", *(report.program.name for report in reports)])
    for name in names:
        entry = reports[0].entries[name]
        if entry.kind == "words":
            continue
        figures = [report.figure(name) for report in reports]
        if all(isinstance(figure, Unknown) for figure in figures):
            continue
        rows.append([entry.title, *[_cell(entry, figure) for figure in figures]])
    text = Text()
    for index, line in enumerate(_aligned(rows)):
        text.append(line[2:] + "\n", _TITLE if index < 1 + several else "")
    text.append("exact but for what is marked: (b) a bound, (e) an estimate", _NOTE)
    return text


def _cell(entry: Entry[Any], figure: Figure[Any] | Unknown) -> str:
    if isinstance(figure, Unknown):
        return "-"
    mark = {"exact": "", "bound": " (b)", "estimate": " (e)"}[figure.quality]
    return value_of(entry, figure) + mark


def html(report: Inquiry) -> str:
    """An HTML table of a report."""
    rows = []
    for name in report.default_names:
        entry, figure = report.entries[name], report.figure(name)
        if isinstance(figure, Unknown):
            value, note = "not known", figure.reason
        else:
            value = escape(value_of(entry, figure)).replace("\n", "<br>")
            note = f"{figure.quality}{', ' if figure.note else ''}{figure.note}"
        title = f"<th style='text-align:left'>{escape(entry.title)}</th>"
        rows.append(f"<tr>{title}<td>{value}</td><td>{escape(note)}</td>")
    head = f"<th colspan='2'>{escape(report.program.name)}, {report.lengths}</th>"
    return f"<table><tr><th></th>{head}</tr>{'</tr>'.join(rows)}</tr></table>"


# --- values ---------------------------------------------------------------------------------------


def value_of(entry: Entry[Any], figure: Figure[Any] | Unknown) -> str:
    """The value of a figure as it is printed."""
    if isinstance(figure, Unknown):
        return ""
    value = figure.value
    if value is None:
        return "never"
    match entry.kind:
        case "count":
            return f"{value:,}"
        case "share":
            return _share(value)
        case "truth":
            return "yes" if value else "no"
        case "flops":
            return _scaled(value, 1000)
        case "bytes":
            return _scaled(value, 1024) + "B"
        case "words":
            return str(value)
        case _:
            return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _scaled(value: int, step: int) -> str:
    """1.23 G, or 1.23 Gi where units are powers of two."""
    number, unit = float(value), 0
    while number >= step and unit < len(_UNITS) - 1:
        number, unit = number / step, unit + 1
    prefix = _UNITS[unit] if step == 1000 else _UNITS[unit].upper() + ("i" if unit else "")
    shown = f"{number:.0f}" if unit == 0 or number >= 999.5 else f"{number:.3g}"
    return f"{shown} {prefix}" if prefix or step == 1024 else shown

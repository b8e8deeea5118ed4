"""The parts of a page below its pictures, as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

import numpy as np

from attnspec.analysis.cost.cost import Seconds
from attnspec.backends.planner import shown_seconds
from attnspec.check.verdicts import Verdict
from attnspec.show.account import Account
from attnspec.show.drawing import Drawing, Fill, Item, Label, Stroke, one_plot
from attnspec.show.figure import Figure, Plot
from attnspec.show.reached import Reach
from attnspec.show.svg import svg

_STATUS = {
    "proven": "holds for every n",
    "checked": "holds",
    "refuted": "does not hold",
    "unchecked": "not checked",
}


def sections(found: Figure, said: Account) -> str:
    """All of them, in their order."""
    parts = [
        ("reached", "What is reached", _reached(found, said.reach)),
        ("cost", "What it costs", _cost(said.costs)),
        ("plan", "What runs", _missing(said.plan) or said.plan._repr_html_()),  # type: ignore[union-attr]
        ("claims", "What it claims", _claims(said.verdicts)),
    ]
    return "\n".join(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{body}\n</section>'
        for name, title, body in parts
    )


def _missing(part: object) -> str:
    """Why a part is not there, "" where it is."""
    return f'<p class="about">Not shown: {escape(part)}.</p>' if isinstance(part, str) else ""


# --- what is reached ------------------------------------------------------------------------------


def _reached(found: Figure, reach: Reach | str) -> str:
    if isinstance(reach, str):
        return _missing(reach)
    n, most = found.plots[0].tally.n, max(1, int(reach.hops.max()))
    drawing = one_plot(_empty(found.plots[0]))
    picture = svg(drawing, f"{found.name}, what is reached", "layers until a key is read")
    whose = "" if reach.side == 1 else " of the last query of each row of cells"
    what = "a key" if reach.side == 1 else "a key of a cell"
    controls = (
        '<p><label for="layers">layers</label> '
        f'<input id="layers" type="range" min="0" max="{most}" value="1" step="1">'
        ' <output id="count" for="layers"></output></p>\n<p id="share"></p>'
    )
    ends = "".join(
        f'<label>{name} <input id="{name}" type="number" min="0" max="{n - 1}" step="1"></label> '
        for name in ("query", "key")
    )
    way = (
        f"<fieldset><legend>Path</legend>{ends}"
        '<button type="button" id="forget">Forget</button></fieldset>\n'
        '<p class="about">Click on a query, then on a key, or press Enter on each; Escape forgets'
        ' them.</p>\n<ol id="path" aria-live="polite"></ol>'
    )
    if reach.no_paths:
        way = f'<p class="about">No paths: {escape(reach.no_paths)}.</p>'
    return (
        f'<p class="about">Layers{whose} until {what} is read, the darker the fewer.</p>\n'
        f'<div class="beside">\n<div id="reach">{picture}</div>\n'
        f'<div class="controls">\n{controls}\n{way}\n</div>\n</div>'
    )


def _empty(plot: Plot) -> Plot:
    """The frame of a plot without its pairs."""
    none = np.zeros_like(plot.tally.density)
    blank = replace(plot.tally, density=none)
    return replace(plot, tally=blank, leading=np.full_like(plot.leading, -1), formula=None)


# --- costs ----------------------------------------------------------------------------------------

_WIDE, _HIGH, _LEFT, _TOP = 400, 220, 62, 14


def _cost(costs: tuple[Seconds, ...] | str) -> str:
    if isinstance(costs, str):
        return _missing(costs)
    if not costs:
        return _missing("none of the lengths at which costs are compared is one of this spec")
    head = "<tr><th>n</th><th>this plan</th><th>dense</th><th>dense / plan</th></tr>"
    rows = "".join(
        f"<tr><td>{each.n:,}</td><td>{shown_seconds(each.plan)}</td>"
        f"<td>{shown_seconds(each.dense)}</td><td>{each.dense / each.plan:.3g}</td></tr>"
        for each in costs
        if each.plan > 0
    )
    table = f'<table class="numbers"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    chart = ""
    if len(costs) > 1:
        about = "estimated time of the plan and of dense attention"
        chart = svg(_chart(costs), "Cost against n", about)
    return (
        '<p class="about">Estimated time of n queries and n keys, forward, all layers and heads of'
        " size 64, on the CPU that the estimates are for, beside torch's dense attention without a"
        " mask.</p>\n"
        f'<div class="beside chart">{chart}{table}</div>'
    )


def _chart(costs: Sequence[Seconds]) -> Drawing:
    """Both times against n, a power of ten as high as any other."""
    values = [time for each in costs for time in (each.plan, each.dense) if time > 0]
    low, high = (
        math.floor(math.log10(min(values))),
        math.ceil(math.log10(max(values))),
    )
    first, last = math.log(costs[0].n), math.log(costs[-1].n)

    def x(each: Seconds) -> float:
        return _LEFT + (_WIDE - _LEFT - 70) * (math.log(each.n) - first) / (last - first)

    def y(seconds: float) -> float:
        share = (math.log10(max(seconds, 10**low)) - low) / max(1, high - low)
        return _TOP + (_HIGH - _TOP - 34) * (1 - share)

    items: list[Item] = [
        Label(_LEFT - 8, y(10**power) + 3.5, shown_seconds(10**power), 10, "quiet", "end")
        for power in range(low, high + 1)
    ]
    items += [
        Stroke(_LEFT, y(10**power), _WIDE - 70, y(10**power), "none")
        for power in range(low, high + 1)
    ]
    items += [Label(x(each), _HIGH - 12, f"{each.n:,}", 10, "quiet", "middle") for each in costs]
    items += _curve([(x(each), y(each.dense)) for each in costs], "dense", "term3")
    items += _curve([(x(each), y(each.plan)) for each in costs], "this plan", "term0")
    return Drawing(_WIDE, _HIGH, tuple(items))


def _curve(points: Sequence[tuple[float, float]], name: str, paint: str) -> Iterator[Item]:
    for (x, y), (to_x, to_y) in pairwise(points):
        yield Stroke(x, y, to_x, to_y, paint)
    for x, y in points:
        yield Fill(x - 2.5, y - 2.5, 5, 5, paint)
    x, y = points[-1]
    yield Label(x + 8, y + 4, name, 10, "ink")


# --- claims ---------------------------------------------------------------------------------------


def _claims(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return '<p class="about">The spec claims nothing: <code>require</code> would.</p>'
    return f"<ul>{''.join(_claim(each) for each in verdicts)}</ul>"


def _claim(verdict: Verdict) -> str:
    status = _STATUS[verdict.status]
    if verdict.status == "checked" or (verdict.status == "refuted" and verdict.failed_at):
        lengths = verdict.lengths if verdict.failed_at is None else (verdict.failed_at,)
        status += f" at n = {', '.join(f'{n:,}' for n in lengths)}"
    found = [text for each in verdict.diagnostics for text in (each.message, *each.notes)]
    said = "".join(f"<br>{escape(line)}" for text in found for line in text.splitlines())
    return (
        f'<li><code>{escape(verdict.claim.text)}</code> <span class="{verdict.status}">{status}'
        f"</span>{said}</li>"
    )

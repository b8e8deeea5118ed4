"""Tables and plots from the figures of a run, and nothing else.

`python -m benchmarks.report` draws `results/growth.svg` and `results/efficiency.svg` from
`results/bench.json` and fills the tables of benchmarks/README.md between their markers; behind them
come those of `results/NAME/bench.json`, measured elsewhere.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import ETA_TARGETS
from benchmarks.lengths import CHANGED, MORE, TIMES
from benchmarks.plots import draw
from benchmarks.shapes import CEILING, MEAN, MODES

HERE = Path(__file__).resolve().parent

MARKERS = "<!-- bench -->", "<!-- /bench -->"

Figures = Mapping[str, Any]


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
            _time(row["forward"]["median"]),
            f"{row['eta_forward']:.2f}",
            _time(row["both"]["median"]),
            f"{row['eta_both']:.2f}",
            _time(row["predicted"]),
        ]
        for row in part["rows"]
    ]
    for column, function in (("geometric mean", "mean"), ("least", "least")):
        if f"{function}_forward" in summary:
            forward, both = (f"{summary[f'{function}_{mode}']:.2f}" for mode in ETA_TARGETS)
            label = f"**{column}**, scattered graphs apart"
            rows.append([label, "", "", "", f"**{forward}**", "", f"**{both}**", ""])
    return _section(
        f"Edge efficiency, n = {part['n']:,}",
        f"Dense attention takes {_time(dense['forward']['median'])} forward and "
        f"{_time(dense['both']['median'])} with gradients. Targets for the geometric mean: "
        f"{ETA_TARGETS['forward']} and {ETA_TARGETS['both']}.",
        "pattern | keys a query | backend | forward | η | with gradients | η | predicted forward",
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
                    _time(row[mode]["ours"]["median"]),
                    _time(row[mode]["torch"]["median"]),
                    f"{row[mode]['ratio']:.2f}×",
                )
            ),
        ]
        for row in part["rows"]
    ]
    said = [
        f"{mode}: geometric mean {found['mean']:.2f}×, worst {found['most']:.2f}×,"
        f" {found['above']} of {found['rows']} rows above {CEILING}×"
        for mode, found in part["summary"].items()
    ]
    return _section(
        "Shapes that people use: samples × heads × positions",
        "Beside torch's own best call for the same pairs: nothing, `is_causal`, or a boolean mask"
        f" made beforehand. Targets: none above {CEILING}×, geometric mean at most {MEAN}×."
        f" {'; '.join(said)}.",
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
        told = f"{worst['name']}, {_time(worst['first'])} and {_time(worst['later'])}"
        rows.append([f"{n:,}", _time(first), _time(later), f"{met} of {len(here)}", told])
    changed = [
        [
            *(row["name"], row["mode"], f"{row['calls']:,}", str(row["lengths"])),
            *(_time(row["whole"]), _time(row["steady"]), _over(row)),
        ]
        for row in part["changing"]
    ]
    kept = "met" if summary["excess"] <= 0 else "missed"
    first_calls = _section(
        "The first call at a new length, specs of the zoo",
        f"Target, in the median: at most {TIMES:g} times a later call and {_time(MORE)}: {kept}.",
        "n | first call, median | later, median | met | farthest from it",
        rows,
    )
    drawn = _section(
        "Another length for each call",
        f"Lengths up to {max(lengths):,}, drawn for each call, beside later calls at the same"
        " lengths: forward of one sample and four heads, and steps of training of two samples and"
        f" twelve heads. Target, in training: at most {CHANGED:g}×.",
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
        times = [_time(seconds[n]) if n in seconds else "left out" for n in lengths]
        fitted = ("exponent", "exponent_edges", "exponent_gathered")
        exponents = [_exponent(row[key]) for key in fitted]
        rows.append([row["name"], *times, *exponents, f"≤ {row['target']:g}"])
    heads = " | ".join(f"{n:,}" for n in lengths)
    return _section(
        "Growth of the forward time with n",
        "Exponents are fitted through the logarithms; a length is left out where a call would "
        "take too long. Where pairs lie anywhere, rows of keys come from ever farther memory: "
        "beside it stands the exponent of reading them alone, edge by edge.",
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
    return ", ".join(dict.fromkeys(row["backends"]))


def _exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def filled(text: str, content: str) -> str:
    """The text with the content between its markers; ValueError unless it has each once."""
    start, stop = MARKERS
    if (text.count(start), text.count(stop)) != (1, 1) or text.index(start) > text.index(stop):
        raise ValueError(f"the text must have `{start}` and then `{stop}`, each once")
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{content}\n{stop}{rest.partition(stop)[2]}"


def main() -> int:
    source = HERE / "results" / "bench.json"
    if not source.exists():
        print("results/bench.json is needed: `make bench` writes it", file=sys.stderr)
        return 1
    figures: Figures = json.loads(source.read_text(encoding="utf-8"))
    drawn = draw(figures, source.parent)
    images = [f"![{path.stem}](results/{path.name})" for path in drawn]
    others = [
        f"## On another machine: {path.parent.name}\n\n"
        + tables(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(source.parent.glob(f"*/{source.name}"))
    ]
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    content = "\n\n".join([*images, tables(figures), *others])
    page.write_text(filled(text, content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the measured tables of README.md from benchmarks/results, never by hand.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->` and comes from `results/NAME.json`.
`--check` writes nothing and exits with 1 where the README is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

Figures = Mapping[str, Any]


def minilm_table(figures: Figures) -> str:
    """What `minilm.py` found: the check in a sentence or two, then a row per radius."""
    texts, versions = figures["texts"], figures["versions"]
    exact = figures["full_graph"]["largest_difference"]
    dropped = figures["without_mask_function"]["largest_difference"]
    by_pattern: dict[str, dict[int, Figures]] = {}
    for row in figures["patterns"]:
        by_pattern.setdefault(row["pattern"], {})[row["radius"]] = row
    both, alone = by_pattern["window and global [CLS]"], by_pattern["window alone"]
    found = (
        f"{texts['count']} texts of {texts['tokens_least']} to {texts['tokens_most']} tokens in "
        f"padded batches. With `attend full` in all {figures['model']['layers']} layers the "
        f"largest difference of an embedding from the original model's is {exact:.1e}. Without "
        f"the mask function that is registered with it, padding would be attended to and the "
        f"difference be {dropped:.2f}. "
        f"Windows, on the {texts['long_count']} texts of {texts['long_from']} tokens or more, at "
        f"their mean length of {texts['long_mean']}:"
    )
    lines = [
        *textwrap.wrap(found, 100),
        "",
        "| radius | edges | density | cosine: mean | least | edges without global "
        "| cosine: mean | least |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for radius in sorted(both, reverse=True):
        lines.append(f"| {radius} | {_cells(both[radius])} | {_cells(alone[radius], False)} |")
    lines += [
        "",
        f"({_machine(figures['machine'])}; Python {versions['python']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}.)",
    ]
    return "\n".join(lines)


def _cells(row: Figures, density: bool = True) -> str:
    cells = [f"{row['edges']:,}", f"{row['density']:.1%}"][: 1 + density]
    return " | ".join([*cells, f"{row['cosine_mean']:.3f}", f"{row['cosine_min']:.3f}"])


def _machine(machine: Figures) -> str:
    return f"{machine['cores']} {machine['architecture']} cores"


def bench_table(figures: Figures) -> str:
    """Edge efficiency as `make bench` found it: a row per pattern, and the geometric means."""
    if "efficiency" not in figures:
        return UNMEASURED
    part = figures["efficiency"]
    summary = part["summary"]
    lines = [
        "| pattern | keys a query | time, forward | η | with gradients | η |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for row in part["rows"]:
        lines.append(
            f"| {row['name']} | {row['edges'] / part['n']:,.0f} "
            f"| {_milliseconds(row['forward'])} | {row['eta_forward']:.2f} "
            f"| {_milliseconds(row['both'])} | {row['eta_both']:.2f} |"
        )
    lines += [
        "| **geometric mean** of all but powers, expander and random | | "
        f"| **{summary['mean_forward']:.2f}** | | **{summary['mean_both']:.2f}** |",
        f"| dense attention, no mask | {part['n']:,} | {_milliseconds(part['dense']['forward'])} "
        f"| 1 | {_milliseconds(part['dense']['both'])} | 1 |",
        "",
        f"(n = {part['n']:,}, 4 heads of size 64, float32; {_machine(part['machine'])}; torch "
        f"{part['versions']['torch']}.)",
    ]
    return "\n".join(lines)


def _milliseconds(timing: Figures) -> str:
    return (
        f"{timing['median'] * 1e3:,.3g} ms" if timing["median"] < 1 else f"{timing['median']:.2f} s"
    )


def accuracy_table(figures: Figures) -> str:
    """What every system has learned of every task that it was trained on, with the spread over the
    seeds, and the time of a step."""
    names = list(dict.fromkeys(name for task in figures.values() for name in task["systems"]))
    heads = [cell for task in figures for cell in (task, "a step")]
    lines = [f"| system | {' | '.join(heads)} |", "|:--" + "|--:" * len(heads) + "|"]
    for name in names:
        cells = []
        for task in figures.values():
            row = task["systems"].get(name)
            cells += ["", ""] if row is None else _learned(row, task["seeds"])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    chance = [cell for task in figures.values() for cell in (f"{task['chance']:.1%}", "")]
    lines += [f"| guessing | {' | '.join(chance)} |", ""]
    told = "; ".join(
        f"{name}: n = {task['n']}, {task['budget']['steps']:,} steps of {task['budget']['batch']}"
        f" examples, {task['seeds']} seeds"
        for name, task in figures.items()
    )
    last = list(figures.values())[-1]
    versions = last["versions"]
    where = f"one thread of {_machine(last['machine'])}; torch {versions['torch']}"
    return "\n".join([*lines, f"({told}; {where}.)"])


def _learned(row: Figures, seeds: int) -> list[str]:
    spread = f" ± {100 * row['spread']:.1f}" if seeds > 1 else ""
    return [f"{100 * row['mean']:.1f}{spread} %", f"{row['step_seconds'] * 1e3:.0f} ms"]


TABLES: dict[str, Callable[[Figures], str]] = {
    "minilm": minilm_table,
    "bench": bench_table,
    "accuracy": accuracy_table,
}

UNMEASURED = "Not measured yet."
"""Stands in place of a table whose figures are missing."""


def filled(readme: str) -> str:
    """The README with every table that it has markers for; raises ValueError for a lone marker."""
    for name, table in TABLES.items():
        start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
        counts = readme.count(start), readme.count(stop)
        if counts == (0, 0):
            continue
        if counts != (1, 1) or readme.index(start) > readme.index(stop):
            raise ValueError(f"README.md must have `{start}` and then `{stop}`, each once")
        source, content = RESULTS / f"{name}.json", UNMEASURED
        if source.exists():
            content = table(json.loads(source.read_text(encoding="utf-8")))
        before, _, rest = readme.partition(start)
        after = rest.partition(stop)[2]
        readme = f"{before}{start}\n{content}\n{stop}{after}"
    return readme


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where stale")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    wanted = filled(readme)
    if options.check and wanted != readme:
        print("the tables of README.md must be those of benchmarks/results", file=sys.stderr)
        print("run: python benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    if wanted != readme:
        path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

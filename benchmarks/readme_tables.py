"""Writes the measured tables of all pages, and the plots, from benchmarks/results, never by hand.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`, on one page, and comes from the file of
`results/` that `TABLES` names. `--check` writes nothing and exits with 1 where a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import exchange, report
from benchmarks.gpu import TARGETS
from benchmarks.plots import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

Figures = Mapping[str, Any]


def _machine(machine: Figures) -> str:
    return f"{machine['cores']} {machine['architecture']} cores"


def bench_table(figures: Figures) -> str:
    """Edge efficiency as `make bench` found it: a row per pattern, and the geometric means."""
    if "efficiency" not in figures:
        return UNMEASURED
    part = figures["efficiency"]
    summary = part["summary"]
    lines = [
        *_efficiency(part, part["rows"]),
        "| **geometric mean** of all but powers, expander and random | | "
        f"| **{summary['mean_forward']:.2f}** | | **{summary['mean_both']:.2f}** |",
        *_beside_dense(part),
        "",
        "dilated(2048, 8): radius and step. strided(128): stride. fixed(128, 8): stride and cells."
        " neighborhood(21, 21): the box of cells. powers(2): base. expander(32), random(32): keys.",
    ]
    return "\n".join([*lines, *_short(figures)])


def brief_table(figures: Figures) -> str:
    """Some rows of `bench_table`, beside dense attention."""
    if "efficiency" not in figures:
        return UNMEASURED
    part = figures["efficiency"]
    rows = [row for row in part["rows"] if row["name"] in BRIEF]
    return "\n".join([*_efficiency(part, rows), *_beside_dense(part)])


BRIEF = ("causal window(511)", "strided(128)", "Longformer 256 + 64", "BigBird 64, 3", "random(32)")
"""Rows of the README: what people use most, and one that takes longer than its pairs should."""


def _efficiency(part: Figures, rows: Sequence[Figures]) -> list[str]:
    lines = [
        "| pattern | keys per query | forward | η, forward | with gradients | η, with gradients |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['edges'] / part['n']:,.0f} "
            f"| {_milliseconds(row['forward'])} | {row['eta_forward']:.2f} "
            f"| {_milliseconds(row['both'])} | {row['eta_both']:.2f} |"
        )
    return lines


def _beside_dense(part: Figures) -> list[str]:
    """The row of dense attention, and what all rows were measured at."""
    return [
        f"| dense attention, no mask | {part['n']:,} | {_milliseconds(part['dense']['forward'])} "
        f"| 1 | {_milliseconds(part['dense']['both'])} | 1 |",
        "",
        f"(n = {part['n']:,}, 4 heads of size 64, float32; {_machine(part['machine'])}; torch "
        f"{part['versions']['torch']}. Longformer: radius and global tokens; BigBird: size of a"
        " block and random blocks. Keys per query are the mean.)",
    ]


SHOWN = ("causal", "window(64)", "BigBird 64/2")
"""The patterns of the shapes that are shown."""


def _short(figures: Figures) -> list[str]:
    """Shapes that people use beside torch's own call."""
    if "shapes" not in figures:
        return []
    summary = figures["shapes"]["summary"]
    means = ", ".join(f"{found['mean']:.2f}× {mode}" for mode, found in summary.items())
    lines = [
        "",
        "Common shapes, forward, compared with torch's own best call, whose mask was made"
        " beforehand. The ratio is our time divided by torch's: below 1 attnspec is faster. The"
        f" geometric mean over [all {summary['forward']['rows']} rows](../benchmarks/README.md),"
        f" padded ones too, is {means}.",
        "",
        "| pattern | samples × heads × n | attnspec | torch | ratio |",
        "|:--|--:|--:|--:|--:|",
    ]
    for row in figures["shapes"]["rows"]:
        found = row["forward"]
        if not row["padded"] and row["name"] in SHOWN:
            lines.append(
                f"| {row['name']} | {row['shape']} | {_milliseconds(found['ours'])}"
                f" | {_milliseconds(found['torch'])} | {found['ratio']:.2f}× |"
            )
    return lines


def _milliseconds(timing: Figures) -> str:
    return (
        f"{timing['median'] * 1e3:,.3g} ms" if timing["median"] < 1 else f"{timing['median']:.2f} s"
    )


def accuracy_table(figures: Figures) -> str:
    """What every system has learned of every task that it was trained on, with the spread over the
    seeds, what a step costs, and what others have published."""
    names = list(dict.fromkeys(name for task in figures.values() for name in task["systems"]))
    heads = [cell for task, found in figures.items() for cell in _heads(task, found)]
    lines = [*_agreement(figures), f"| system | {' | '.join(heads)} |"]
    lines.append("|:--" + "|--:" * len(heads) + "|")
    for name in names:
        cells = [cell for task in figures.values() for cell in _learned(task, name)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    most = [cell for task in figures.values() for cell in _most_frequent(task)]
    lines += [f"| always the most frequent answer | {' | '.join(most)} |", ""]
    told = "; ".join(
        f"{name}: n = {task['n']}, {task['budget']['steps']:,} steps of {task['budget']['batch']}"
        f" sequences, {task['seeds']} seeds"
        for name, task in figures.items()
    )
    last = list(figures.values())[-1]
    where = f"one thread of {_machine(last['machine'])}; torch {last['versions']['torch']}"
    return "\n".join([*lines, f"(Mean ± standard deviation over the seeds. {told}; {where}.)"])


def _heads(name: str, task: Figures) -> list[str]:
    beside = [task["published"]["title"]] if "published" in task else []
    return [name, "one step", *beside]


def _learned(task: Figures, name: str) -> list[str]:
    row, cells = task["systems"].get(name), ["", ""]
    if row is not None:
        spread = f" ± {100 * row['spread']:.1f}" if task["seeds"] > 1 else ""
        cost = f"{row['step_seconds'] * 1e3:.0f} ms, {row['peak_bytes'] / 1e6:.0f} MB"
        cells = [f"{100 * row['mean']:.1f}{spread} %", cost]
    if "published" in task:
        known = task["published"]["accuracies"].get(name)
        cells.append("" if known is None else f"{known:.1f} %")
    return cells


def _most_frequent(task: Figures) -> list[str]:
    return [f"{100 * task['chance']:.1f} %", *("" for _ in _heads("", task)[1:])]


def _agreement(figures: Figures) -> list[str]:
    """Whether the published figures rank the systems alike, by task."""
    from scipy.stats import spearmanr  # takes a second and a half

    found = []
    for name, task in figures.items():
        known = task.get("published", {}).get("accuracies", {})
        shared = [each for each in known if each in task["systems"]]
        if len(shared) > 2:
            ours = [task["systems"][each]["mean"] for each in shared]
            rho = float(spearmanr(ours, [known[each] for each in shared]).statistic)
            found.append(f"{rho:+.2f} for {name} ({len(shared)} systems)")
    if not found:
        return []
    ranks = "**These tasks do not rank the systems as the Long Range Arena does.** Spearman's rank"
    return [f"{ranks} correlation with its figures is {' and '.join(found)}.", ""]


def gpu_table(figures: Figures) -> str:
    """What was found on a GPU, a line for the checks and one for each target; what was not measured
    says so."""
    checks = [*figures.get("checks", {}).values()]
    right = f"{sum(row['ok'] for row in checks):,} of {len(checks):,}" if checks else NOT_MEASURED
    lines = [
        "| target | what | rows that meet it | worst ratio, forward / backward |",
        "|:--|:--|--:|--:|",
        f"| right | every spec of the zoo against float64, values and gradients | {right} | |",
    ]
    for target, words in TARGETS.items():
        times = figures.get("times", {}).items()
        known = [row for name, row in times if name.startswith(f"{target},") and "ok" in row]
        held = f"{sum(row['ok'] for row in known)} of {len(known)}" if known else NOT_MEASURED
        least = " / ".join(filter(None, (_least(known, mode) for mode in ("forward", "backward"))))
        lines.append(f"| {target} | {words} | {held} | {least} |")
    if "machine" in figures:
        where = f"{figures['machine'].get('accelerator')}; torch {figures['versions']['torch']}"
        lines += [
            "",
            f"({where}. A ratio above 1 means that attnspec is faster.{_earlier(figures)})",
        ]
    return "\n".join(lines)


def _earlier(figures: Figures) -> str:
    """Which rows earlier code gave, because the time of a later run ended before them."""
    rows = (row for part in ("checks", "times") for row in figures[part].items())
    names = [name for name, row in rows if row.get("earlier")]
    count = Counter("checks" if "," not in name[:3] else name[:2] for name in names)
    of = ", ".join(f"{many} of {what}" for what, many in sorted(count.items()))
    return f" Earlier code gave {len(names)} rows: {of}." if names else ""


def _least(rows: Sequence[Figures], mode: str) -> str:
    """The worst of the ratios of some rows, "" where there are none."""
    found = [row[kind][mode] for row in rows for kind in ("ratio", "eta") if kind in row]
    return f"{min(found):.2f}" if found else ""


def ranks_table(figures: Figures) -> str:
    """Bytes and seconds of a call over local ranks, beside gathering all keys."""
    settings = figures["settings"]
    lines = [
        "| attention | ranks | way | most received | bytes of all keys | time | with all-gather |",
        "|:--|--:|:--|--:|--:|--:|--:|",
    ]
    for row in (row for rows in figures["rows"].values() for row in rows if row["ranks"] > 1):
        beside = row.get("seconds_gathering")
        lines.append(
            f"| {row['case']} | {row['ranks']} | {row['how']}"
            f" | {row['bytes_received'] / 1e6:,.2f} MB | {row['bytes_gathered'] / 1e6:,.2f} MB"
            f" | {row['seconds'] * 1e3:,.0f} ms"
            f" | {'' if beside is None else f'{beside * 1e3:,.0f} ms'} |"
        )
    told = (
        f"(Forward; n = {settings['n']:,}, {settings['heads']} heads and"
        f" {settings['key_heads']} key heads of size {settings['head_dim']}, float32, gloo;"
        f" all ranks share {_machine(figures['machine'])}; torch {figures['versions']['torch']}.)"
    )
    return "\n".join([*lines, "", told])


def exchange_table(figures: Figures) -> str:
    """What reaches a rank of 8 and of 64: a row for each spec whose graph says what travels."""
    specs: dict[str, list[Figures]] = {}
    for each in sorted(figures["rows"].values(), key=lambda one: one["ranks"]):
        specs.setdefault(each["name"], []).append(each)
    whole = sorted(name for name, rows in specs.items() if set(rows[0]["how"]) == {"all"})
    lines = [
        "| spec | n | heads | way; partition | received | keys alone | by heads | sums | all-gather"
        " | balance |",
        "|:--|--:|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(set(specs) - set(whole)):
        rows = specs[name]
        ways = [", ".join(dict.fromkeys(row["how"])) for row in rows]
        partitions = dict.fromkeys(row["partition"] for row in rows)
        lines.append(
            f"| {name} | {rows[0]['n']:,} | {rows[0]['heads']} / {rows[0]['key_heads']}"
            f" | {' / '.join(dict.fromkeys(ways))}; {' / '.join(partitions)}"
            f" | {_two(rows, 'bytes')} | {_two(rows, 'keys_alone')} | {_two(rows, 'by_heads')}"
            f" | {_two(rows, 'states')} | {_two(rows, 'gathered')}"
            f" | {' / '.join(format(row['balance'], '.2f') for row in rows)} |"
        )
    versions = figures["versions"]
    told = (
        "Megabytes that reach the busiest rank in all layers, forward. Each cell: 8 / 64 ranks."
        " Heads: of queries / of keys. Some specs send everything to every rank, as their heads"
        f" choose pairs together: {', '.join(whole)}. Python"
        f" {versions['python']}, numpy {versions['numpy']}, scipy {versions['scipy']}."
    )
    missing = sorted({name for name, _ in exchange.specs()} - set(specs))
    if missing:
        told += f" Specs without a row yet: {', '.join(missing)}."
    return "\n".join([*lines, "", told])


def _two(rows: Sequence[Figures], what: str) -> str:
    """Megabytes of both numbers of ranks, "" where that way is none."""
    if any(row[what] is None for row in rows):
        return ""
    return " / ".join(f"{row[what] / 1e6:,.1f}" for row in rows)


NOT_MEASURED = "not measured"

TABLES: dict[str, tuple[str, str, Callable[[Figures], str]]] = {
    "brief": ("README.md", "bench.json", brief_table),
    "every": ("benchmarks/README.md", "bench.json", report.page),
    "bench": ("docs/speed.md", "bench.json", bench_table),
    "gpu": ("docs/speed.md", "gpu.json", gpu_table),
    "accuracy": ("docs/learning.md", "accuracy.json", accuracy_table),
    "exchange": ("attnspec/distributed/README.md", "exchange.json", exchange_table),
    "ranks": ("attnspec/distributed/README.md", "distributed.json", ranks_table),
}
"""Where each table stands, the results that it shows, and how."""

UNMEASURED = "Not measured yet."
"""Stands in place of a table whose figures are missing."""


def filled(page: str, text: str) -> str:
    """The text of a page with its tables; raises ValueError where the markers of one are not both
    there, once."""
    for name, (place, results, table) in TABLES.items():
        if place != page:
            continue
        start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
        counts = text.count(start), text.count(stop)
        if counts != (1, 1) or text.index(start) > text.index(stop):
            raise ValueError(f"{page} must have `{start}` and then `{stop}`, each once")
        source, content = RESULTS / results, UNMEASURED
        if name == "gpu" and not source.exists():
            content = gpu_table({})
        elif source.exists():
            content = table(json.loads(source.read_text(encoding="utf-8")))
        before, _, rest = text.partition(start)
        after = rest.partition(stop)[2]
        text = f"{before}{start}\n{content}\n{stop}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where stale")
    options = parser.parse_args(arguments)
    stale = []
    for page in dict.fromkeys(place for place, _, _ in TABLES.values()):
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        wanted = filled(page, text)
        if wanted != text:
            stale.append(page)
            if not options.check:
                path.write_text(wanted, encoding="utf-8")
    if not options.check:
        draw(json.loads((RESULTS / "bench.json").read_text(encoding="utf-8")), RESULTS)
    if options.check and stale:
        told = " and ".join(stale)
        print(f"the tables of {told} must be those of benchmarks/results", file=sys.stderr)
        print("run: python -m benchmarks.readme_tables", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

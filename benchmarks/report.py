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
from benchmarks.decided import TARGETS as DECIDED
from benchmarks.lengths import CHANGED, MORE, TIMES
from benchmarks.neighbour import TARGET as BESIDE
from benchmarks.plots import draw
from benchmarks.shapes import CEILING, MEAN, MODES

HERE = Path(__file__).resolve().parent

MARKERS = "<!-- bench -->", "<!-- /bench -->"

CHOSEN_FROM = {
    "listed": "the {} listed patterns",
    "zoo": "{} specs of the zoo",
    "random": "{} random specs",
    "all": "all {}",
}
"""What the planner chooses for, by kind."""

SLOWEST = 5
"""So many of the files whose check takes longest are named."""

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


def _types(part: Figures) -> str:
    kinds = list(part["dense"])
    rows = [
        [
            row["name"],
            *(
                cell
                for kind in kinds
                for mode in MODES
                for cell in (_time(row[kind][mode]["median"]), f"{row[kind]['eta'][mode]:.2f}")
            ),
        ]
        for row in part["rows"]
    ]
    dense = "; ".join(
        f"{kind}: {' and '.join(_time(found[mode]['median']) for mode in MODES)}"
        for kind, found in part["dense"].items()
    )
    head = " | ".join(f"{kind}, {mode} | η" for kind in kinds for mode in MODES)
    return _section(
        f"Half types, n = {part['n']:,}",
        f"η is against dense attention of the same type ({dense}, forward and training).",
        f"pattern | {head}",
        rows,
    )


def _fused(part: Figures) -> str:
    rows = []
    for row in part["rows"]:
        cells = [row["name"], f"{row['flash'] / 1e9:.0f}"]
        for name in ("products", "floor"):
            cells += [f"{row[name] / 1e9:.0f}", f"{row[name] / row['flash']:.2f}×"]
        rows.append(cells)
    gain = part["gain"]
    return _section(
        "Whether another kernel could beat torch's",
        "Tiles, forward, GFLOP/s of two products: by torch's flash kernel, by the library's matrix"
        " products in the cache with a softmax between them, and by these products alone, which is"
        " more than any kernel made of them can reach. Wanted for a kernel of our own: 1.3×."
        f" Geometric means: {gain['products']:.2f}× and {gain['floor']:.2f}×.",
        "tiles × queries × keys | flash | products and softmax | | products alone |",
        rows,
    )


def _neighbour(part: Figures) -> str:
    rows = [
        [
            row["name"],
            row["mode"],
            _time(row["quiet"]["median"]),
            _time(row["busy"]["median"]),
            f"{row['slower']:.2f}×",
            f"{row['ratio']:.2f}×",
        ]
        for row in part["rows"]
    ]
    short = [
        [
            row["name"],
            row["shape"],
            _time(row["ours"]["median"]),
            _time(row["torch"]["median"]),
            f"{row['ratio']:.2f}×",
        ]
        for row in part["shapes"]
    ]
    first = _section(
        f"Beside a process that keeps a core busy, n = {part['n']:,}",
        f"Target: at most {BESIDE:g} times the slow-down of dense attention in the same run. Dense"
        " attention by 32 calls, and of a quarter of the sequence, slows down more, too: each call"
        " waits for its last thread, and threads are moved between cores in tens of milliseconds.",
        "pattern | pass | quiet | busy | slower | of dense attention's",
        rows,
    )
    second = _section(
        "The same, shapes that people use, forward",
        "Both sides beside the busy process.",
        "pattern | shape | attnspec | torch | ratio",
        short,
    )
    return f"{first}\n\n{second}"


def _untuned(part: Figures) -> str:
    rows = [
        [
            row["name"],
            _backends(row),
            _time(row["ours"]["median"]),
            _time(row["dense"]["median"]),
            f"{row['ratio']:.2f}×",
        ]
        for row in part["rows"]
    ]
    return _section(
        f"Patterns that nothing is tuned for, n = {part['n']:,}, forward",
        f"Beside dense attention without a mask. Target: at most {part['target']:g}×.",
        "pattern | backend | attnspec | dense | ratio",
        rows,
    )


def _flex(part: Figures) -> str:
    rows = [
        _unmeasured(row, 5)
        or [
            row["name"],
            _backends(row),
            _time(row["ours"]["median"]),
            _time(row["flex"]["median"]),
            f"{row['ratio']:.1f}×",
            f"≥ {row['target']:g}×",
        ]
        for row in part["rows"]
    ]
    return _section(
        f"Beside FlexAttention, n = {part['n']:,}, forward",
        "Compiled, with the same mask, whose construction is not counted.",
        "pattern | backend | attnspec | FlexAttention | ratio | target",
        rows,
    )


def _packages(part: Figures) -> str:
    rows = [
        _unmeasured(row, 5)
        or [
            row["name"],
            row["package"],
            _time(row["ours"]["median"]),
            _time(row["theirs"]["median"]),
            f"{row['ratio']:.1f}×",
            f"≥ {row['target']:g}×",
        ]
        for row in part["rows"]
    ]
    return _section(
        f"Beside packages, n = {part['n']:,}, forward",
        "The same work, without their projections.",
        "work | package | attnspec | package's time | ratio | target",
        rows,
    )


def _plans(part: Figures) -> str:
    rows = [
        _unmeasured(row, 5)
        or [
            row["name"],
            f"{row['n']:,}",
            ", ".join(row["backends"]),
            _time(row["choosing_seconds"]),
            _time(row["building_seconds"]),
            _bytes(row["extra_bytes"]),
        ]
        for row in part["rows"]
    ]
    beside = [
        _unmeasured(row, 4)
        or [
            row["name"],
            f"{row['n']:,}",
            _time(row["seconds"]),
            _time(row["block_mask_seconds"]),
            f"{row['ratio']:,.0f}×",
        ]
        for row in part["block_mask"]
    ]
    return "\n\n".join(
        [
            _section(
                f"Block plans of the zoo's static specs, n = {part['n']:,}",
                "Choosing a backend for every layer and head, then writing its tables. "
                "Target: 1 s and 1 GB.",
                "spec | n | backends | choosing | writing | peak of memory",
                rows,
            ),
            _section(
                "Beside `create_block_mask`",
                "Choosing and writing against the construction of FlexAttention's blocks. "
                "Target: 100×, at n = 32,768.",
                "pattern | n | attnspec | `create_block_mask` | ratio",
                beside,
            ),
        ]
    )


def _answers(part: Figures) -> str:
    targets = part["targets"]
    asked = ("counts", "hops", "diameter", "path_length")
    rows = [
        _unmeasured(row, 7)
        or [
            row["name"],
            f"{row['n']:,}",
            *(_within(row[name], targets[name]) for name in asked[:2]),
            f"{row['reach_n']:,}",
            *(_within(row[name], targets[name]) for name in asked[2:]),
        ]
        for row in part["rows"]
    ]
    limits = [_time(targets[name]) for name in asked]
    checked = sorted(part["check"], key=lambda row: row["seconds"], reverse=True)
    slowest = [[row["name"], _within(row["seconds"], targets["check"])] for row in checked]
    median = statistics.median(row["seconds"] for row in checked)
    return "\n\n".join(
        [
            _section(
                f"Answers about the zoo's static specs, n = {part['n']:,} and {part['reach_n']:,}",
                f"Exact `edges` and `degree`, `hops` of the last query; then `diameter` and "
                f"`path_length`, of all pairs. Targets: {', '.join(limits)}; what misses one is "
                "bold.",
                "spec | n | `edges`, `degree` | `hops` | n | `diameter` | `path_length`",
                rows,
            ),
            _section(
                "`attnspec check`, a whole process",
                f"The median over {len(checked)} files of the zoo is {_time(median)}; target: "
                f"{_time(targets['check'])}. The slowest:",
                "file | wall clock",
                slowest[:SLOWEST],
            ),
        ]
    )


def _emitting(part: Figures) -> str:
    rows, target = part["rows"], part["target"]
    median = statistics.median(row["seconds"] for row in rows)
    return _section(
        "`attnspec compile`, beyond `import torch`",
        f"Whole processes, wall clock; `import torch` alone takes {_time(part['import_torch'])}. "
        f"The median over {len(rows)} files of the zoo is {_time(median)}; target: "
        f"{_time(target)}. The slowest:",
        "file | beyond `import torch` | runs",
        [
            [row["name"], _within(row["seconds"], target), str(row["runs"])]
            for row in rows[:SLOWEST]
        ],
    )


def _within(seconds: float, target: float) -> str:
    return _time(seconds) if seconds <= target else f"**{_time(seconds)}**"


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


def _memory(part: Figures) -> str:
    rows = [
        _unmeasured(row, 4)
        or [
            row["name"],
            f"{row['n']:,}",
            _bytes(row["extra_bytes"]),
            f"{row['ratio']:.2f}×",
            f"≤ {row['target']:g}×",
        ]
        for row in part["rows"]
    ]
    return _section(
        "Memory of a step forward and backward",
        "The peak beyond q, k and v, results and gradients included, in units of q, k, v and "
        "out together.",
        "pattern | n | peak | ratio | target",
        rows,
    )


def _choices(part: Figures) -> str:
    rows = [
        _unmeasured(row, 5)
        or [
            row["name"],
            ", ".join(row["chosen"]),
            row["best"],
            f"{row['ratio']:.2f}×",
            ", ".join(f"{name} {_time(seconds)}" for name, seconds in row["seconds"].items()),
            ", ".join(f"{name}: {why}" for name, why in row["left_out"].items()) or "nothing",
        ]
        for row in part["rows"]
    ]
    summary = part["summary"]
    found = "; ".join(
        f"over {CHOSEN_FROM[kind].format(each['count'])} the median is {each['median']:.2f}×, "
        f"the worst {each['worst']:.2f}×"
        for kind, each in summary.items()
    )
    return _section(
        f"What the planner's choice costs, n = {part['n']:,}",
        f"The time of the chosen backend over that of the fastest, forward: "
        f"{found or 'no pattern had a choice'}.",
        "pattern | chosen | fastest | ratio | measured | left out",
        rows,
    )


def _beside_reformer(summary: Figures) -> str:
    if not any(summary.get("lsh", {}).values()):
        return "reformer-pytorch was not there to compare `lsh` with."
    found = "`lsh` is {forward:.1f} times as fast as reformer-pytorch, with gradients {both:.1f}"
    text = found.format(**summary["lsh"]) + f" times, target {DECIDED['lsh']:.0f}."
    if "products" not in summary:
        return text
    alone = (
        " Its matrix products alone, half of them of projections, are {forward:.1f} and {both:.1f}"
        " times as fast: what computes them all is no faster."
    )
    text += alone.format(**summary["products"])
    if "steps" not in summary:
        return text
    steps = (
        " With the farthest column of each projection, the rows in the order of each round and the"
        " powers of scores, all in torch's operations, they are {forward:.1f} times as fast, and"
        " with the products of gradients {both:.1f}."
    )
    return text + steps.format(**summary["steps"])


def _decided(part: Figures) -> str:
    rows = [
        [
            row["name"],
            ", ".join(row["backends"]),
            _time(row["forward"]["median"]),
            _time(row["both"]["median"]),
        ]
        for row in part["rows"]
    ]
    summary = part["summary"]
    first = _section(
        f"Graphs that the data decide, n = {part['n']:,}",
        f"`chosen`, 16 blocks of 64: eta {summary['eta_forward']:.2f}, with gradients"
        f" {summary['eta_both']:.2f}, target {DECIDED['chosen']}. `topk` takes"
        f" {summary['topk']:.2f}× the product of its scores and the same tiles, target at most"
        f" {DECIDED['topk']}×. {_beside_reformer(summary)}",
        "graph | backend | forward | forward + backward",
        rows,
    )
    second = _section(
        "How their time grows, forward",
        f"Target: an exponent of at most {DECIDED['growth']}, where choosing takes as many"
        " operations for a token of every length. Buckets of `lsh` that are not given are"
        " 2 n / chunk, so that its projections take n²; `cluster(isqrt(n))` takes n^1.5, the least"
        " of any number of clusters.",
        "graph | lengths | times | exponent | of the operations of choosing",
        [
            [
                row["name"],
                ", ".join(f"{n:,}" for n in row["lengths"]),
                ", ".join(_time(seconds) for seconds in row["seconds"]),
                f"{row['exponent']:.2f}",
                f"{row['choosing']:.2f}" if "choosing" in row else "",
            ]
            for row in part["growth"]
        ],
    )
    third = _section(
        "Their memory: a training step beyond its inputs, in units of q, k, v and the output",
        "Target: the same at every length.",
        "graph | n | units",
        [
            [row["name"], f"{row['n']:,}", row.get("reason") or f"{row['ratio']:.1f}"]
            for row in part["memory"]
        ],
    )
    return "\n\n".join((first, second, third))


TABLES: dict[str, Callable[[Figures], str]] = {
    "efficiency": _efficiency,
    "shapes": _shapes,
    "lengths": _lengths,
    "types": _types,
    "neighbour": _neighbour,
    "decided": _decided,
    "untuned": _untuned,
    "fused": _fused,
    "flex": _flex,
    "packages": _packages,
    "plans": _plans,
    "answers": _answers,
    "emitting": _emitting,
    "growth": _growth,
    "memory": _memory,
    "choices": _choices,
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


def _unmeasured(row: Figures, columns: int) -> list[str] | None:
    """The cells of a row without figures, None for one that has them."""
    if "reason" not in row:
        return None
    reason = row["reason"].replace("|", "\\|")
    return [row["name"], f"not measured: {reason}", *[""] * (columns - 1)]


def _backends(row: Figures) -> str:
    return ", ".join(dict.fromkeys(row["backends"]))


def _exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


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

"""The figures of a report about what tensors decide: how each is found before they are there.

Each function raises Unknown, with the reason, where its figure is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.approximation.choices import finds as finds_words
from attnspec.analysis.approximation.choices import overflows as overflows_words
from attnspec.analysis.counting.choices import expected_keys, most_keys
from attnspec.analysis.quality import Figure, Unknown
from attnspec.graphs.relation import DataDependent

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry


def most(name: str, report: Inquiry) -> Figure[Any]:
    """At most so many edges, so dense, so many keys of a query; raises Unknown for other counts."""
    if name not in ("edges", "density", "degree"):
        raise Unknown(report.stack.unknown or "")
    queries = report.stack.queries(report.length)
    rows = _rows(
        report,
        lambda relation: np.minimum(most_keys(relation, report.length)[queries], report.n),
    )
    edges = sum(int(row.sum()) for row in rows)
    if name == "degree":
        return Figure(max(int(row.max(initial=0)) for row in rows), "bound", "at most")
    if name == "edges":
        return Figure(edges, "bound", "at most")
    return Figure(edges / max(1, len(rows) * report.queries * report.n), "bound", "at most")


def _rows(report: Inquiry, of: Any) -> list[Any]:
    """What is found of the graph of each layer and head."""
    known: dict[Any, Any] = {}
    rows = []
    for layer, row in enumerate(report.program.slots):
        for head in range(len(row)):
            relation = report.unbound.get((layer, head))
            if relation is None:
                relation = report.stack.relation(report.length, layer, head)
            if relation not in known:
                known[relation] = of(relation)
            rows.append(known[relation])
    return rows


def expected_edges(report: Inquiry) -> Figure[Any]:
    """The edges of all layers and heads that are expected."""
    if any(attend.mechanism is not None for attend in report.program.attends):
        raise Unknown("mechanisms weigh every pair")
    rows = _rows(report, lambda r: expected_keys(r, report.length, report.program.causal))
    if None in rows:
        raise Unknown("nothing is assumed of inputs, thresholds and masses")
    assumed = sorted({word for _, words in rows for word in words})
    found = round(sum(float(np.sum(row)) for row, _ in rows))
    if not assumed:
        return Figure(found, "exact", "where enough candidates have a score")
    return Figure(found, "estimate", f"assumed: {', '.join(assumed)}")


def choice(report: Inquiry) -> Figure[Any]:
    """What each choice is made by."""
    lines: dict[str, None] = {}
    for leaf in _leaves(report):
        ahead = leaf.ahead(report.length)
        if leaf.given_choice and ahead is None:
            words = "given by an input"
        elif not report.program.causal and ahead is None:
            words = (
                "by all tokens" if leaf.most_keys(report.length) < report.length else "by tokens"
            )
        else:
            words = "by what is before a query" if ahead is None else f"looks ahead: {ahead.why}"
        lines[f"{leaf.name}: {words}" + (f"; {leaf.weighs}" if leaf.weighs else "")] = None
    return Figure("\n".join(lines))


def scoring_flops(report: Inquiry) -> Figure[Any]:
    """Operations of the choices of one layer, all heads and samples; the most expensive layer."""
    n, d = report.length, report.shape.head_dim
    layers: dict[int, int] = {}
    copies = report.shape.batch * (
        report.shape.heads_of(report.program) if report.program.heads is None else 1
    )
    words = set()
    for (layer, _), leaves in report.choices.items():
        found = [leaf.scoring(n, d) for leaf in leaves]
        layers[layer] = layers.get(layer, 0) + copies * sum(count for count, _ in found)
        words |= {word for _, word in found} - {""}
    most = max(layers.values(), default=0)
    return Figure(most, "bound", "; ".join(["at most", *sorted(words)])) if most else Figure(0)


def finds(report: Inquiry) -> Figure[Any]:
    """How likely what is looked for is found."""
    lines = [finds_words(leaf, report.length, report.shape.head_dim) for leaf in _leaves(report)]
    return _told(lines, "estimate")


def overflows(report: Inquiry) -> Figure[Any]:
    """How likely what is found together does not fit."""
    return _told([overflows_words(leaf, report.length) for leaf in _leaves(report)], "bound")


def _told(lines: list[str], quality: Any) -> Figure[Any]:
    said = [line for line in dict.fromkeys(lines) if line]
    if not said:
        raise Unknown("no formula is known of these choices")
    return Figure("\n".join(said), quality)


def _leaves(report: Inquiry) -> list[DataDependent]:
    return list(dict.fromkeys(leaf for leaves in report.choices.values() for leaf in leaves))

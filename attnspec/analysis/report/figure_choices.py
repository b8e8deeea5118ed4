"""The figures of a report about what tensors decide: how each is found before they are there.

Each function raises Unknown, with the reason, where its figure is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting.degrees import most_keys
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
    by_key: dict[Any, Any] = {}
    rows = []
    for layer, row in enumerate(report.program.slots):
        for head in range(len(row)):
            relation = report.unbound.get((layer, head))
            if relation is None:
                relation = report.stack.relation(report.length, layer, head)
            if relation not in by_key:
                by_key[relation] = of(relation)
            rows.append(by_key[relation])
    return rows


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
        operations = [leaf.scoring(n, d) for leaf in leaves]
        layers[layer] = layers.get(layer, 0) + copies * sum(count for count, _ in operations)
        words |= {word for _, word in operations} - {""}
    most = max(layers.values(), default=0)
    return Figure(most, "bound", "; ".join(["at most", *sorted(words)])) if most else Figure(0)


def _leaves(report: Inquiry) -> list[DataDependent]:
    return list(dict.fromkeys(leaf for leaves in report.choices.values() for leaf in leaves))

"""Everything that is asked of a spec at one length: figures that are computed when they are read.

Each is exact, a bound or an estimate; what is not known is None, with a reason. Figures over the
whole stack are attributes, those of single heads are in `per_head`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from attnspec.analysis.counting.figures import HeadCounts
from attnspec.analysis.quality import Figure, Quality, Unknown
from attnspec.analysis.reach import reach
from attnspec.analysis.reach.reach import Steps
from attnspec.analysis.report import figure_costs as costs
from attnspec.analysis.report import figure_pairs as pairs
from attnspec.analysis.report.inquiry import APART, Entry, Inquiry
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.api_checks import index_of
from attnspec.text.diagnostics import AttnSpecError


class Qualities(Mapping[str, "Quality | None"]):
    """By the name of a figure how far it is to be trusted, None where it is not known."""

    def __init__(self, report: Inquiry) -> None:
        self._report = report

    def __getitem__(self, name: str) -> Quality | None:
        figure = self._report.figure(name)
        return None if isinstance(figure, Unknown) else figure.quality

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


class Report(Inquiry):
    """The analysis of a spec at n positions, as `Inquiry` has them."""

    @property
    def quality(self) -> Qualities:
        """By the name of a figure "exact", "bound" or "estimate", None where it is not known."""
        return Qualities(self)

    # the figures themselves: their values, None where they are not known

    edges = Entry[int]("pairs", "reads", pairs.counted("edges"), "count", promised=True)
    """The pairs of all layers and heads together; beyond a limit of the analysis its error."""

    density = Entry[float]("density", "reads", pairs.counted("density"), "share")
    """The pairs as a part of n * n * heads * layers, with `cross` of m * n * heads * layers."""

    degree = Entry[int](
        "keys of a query, most", "reads", pairs.counted("degree"), "count", promised=True
    )
    """The most keys of one query in one head; beyond a limit of the analysis its error."""

    min_degree = Entry[int](
        "keys of a query, fewest", "reads", pairs.counted("min_degree"), "count"
    )
    """The fewest keys of one query in one head."""

    mean_degree = Entry[float]("keys of a query, mean", "reads", pairs.mean_degree)
    """The mean number of keys of a query in a head."""

    graph_edges = Entry[int]("pairs of graph heads", "reads", pairs.counted("edges", True), "count")
    """The pairs of the heads that have a graph and no mechanism, together."""

    graph_density = Entry[float](
        "density of these", "reads", pairs.counted("density", True), "share"
    )
    """These as a part of n * n for each such head."""

    graph_degree = Entry[int](
        "keys of a query there, most", "reads", pairs.counted("degree", True), "count"
    )
    """The most keys of one query in one such head."""

    graph_min_degree = Entry[int](
        "keys of a query there, fewest", "reads", pairs.counted("min_degree", True), "count"
    )
    """The fewest keys of one query in one such head."""

    readers = Entry[int](
        "readers of a key, most", "reads", pairs.over_heads("readers", max), "count"
    )
    """The most queries that read one key in one head: the in-degree."""

    min_readers = Entry[int](
        "readers of a key, fewest", "reads", pairs.over_heads("min_readers", min), "count"
    )
    """The fewest queries that read one key in one head."""

    empty_rows = Entry[int](
        "queries without a key", "reads", pairs.over_heads("empty_rows", sum), "count"
    )
    """Queries without a key, in all heads of all layers."""

    unread_keys = Entry[int](
        "keys that nobody reads", "reads", pairs.over_heads("unread_keys", sum), "count"
    )
    """Keys that no query reads, in all heads of all layers."""

    rows_nonempty = Entry[bool]("every query has a key", "reads", pairs.rows_nonempty, "truth")
    """Whether every query has a key in every head."""

    causal = Entry[bool]("causal", "reads", pairs.causal, "truth")
    """Whether no position is influenced by a later one through any number of layers."""

    stable = Entry[bool]("rows independent of n", "reads", pairs.stable, "truth")
    """Whether row q is the same pairs at every n > q, in every head of every layer."""

    symmetric = Entry[bool]("symmetric", "reads", pairs.symmetric, "truth")
    """Whether (q, k) implies (k, q) in every head."""

    choice = Entry[str]("choice", "decides", pairs.choice, "words")
    """What each data-dependent choice depends on, and how it changes weights."""

    scoring_flops = Entry[int]("operations of choosing", "decides", pairs.scoring_flops, "flops")
    """Operations by which one layer decides, all heads, apart from those of attention."""

    order = Entry[str]("order", "grows", pairs.order, "words")
    """How fast the edges grow with n, constant factors left out: "n", "n * log2(n)", "n**(3/2)"."""

    depth = Entry[int]("depth in layers", "reaches", pairs.reach("depth"), "never")
    """The fewest layers after which every query has read every key that it can ever reach."""

    diameter = Entry[int]("diameter", "reaches", pairs.reach("diameter"), "never")
    """The longest shortest path between allowed pairs in the union of all layers and heads."""

    path_length = Entry[float]("mean path", "reaches", pairs.reach("path_length"), "never")
    """The mean shortest path between allowed pairs in the union of all layers and heads."""

    spectral_gap = Entry[float]("spectral gap", "mixes", pairs.spectral_gap)
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union."""

    flops = Entry[int]("operations", "costs", costs.cost("flops"), "flops")
    """Operations of one layer, all heads, forward: 4 d for every pair that the plan computes,
    those masked out included; the most expensive layer counts."""

    useful_flops = Entry[int]("useful operations", "costs", costs.cost("useful_flops"), "flops")
    """Operations of one layer for the pairs of the graph alone."""

    backward_flops = Entry[int](
        "operations, backward", "costs", costs.cost("backward_flops"), "flops"
    )
    """Operations of the backward pass of one layer: 8 d a pair, 10 d where scores are computed
    again."""

    bytes = Entry[int]("traffic", "costs", costs.cost("bytes"), "bytes")
    """Bytes that the steps of one layer read and write, forward."""

    peak_memory = Entry[int]("peak memory", "costs", costs.cost("peak_memory"), "bytes")
    """Bytes held at one time, forward: q, k, v, the output and the temporaries of a layer."""

    intensity = Entry[float]("operations per byte", "costs", costs.cost("intensity"))
    """Operations for each byte moved, forward."""

    break_even = Entry[int]("cheaper than dense from length", "costs", costs.break_even, "count")
    """The least length from which on the plan is estimated to beat dense attention."""

    kv_cache = Entry[int]("keys held, most", "generation", costs.kv_cache, "count")
    """The most keys that one head of a causal spec must hold at one time of generation."""

    kv_cache_bytes = Entry[int]("cache, all heads", "generation", costs.kv_cache_bytes, "bytes")
    """Keys and values of all heads and layers that are held at one time, in bytes."""

    eviction = Entry[str]("rule", "generation", costs.eviction, "words")
    """When a key may leave the cache, in words, for each different graph."""

    # --- reach -----------------------------------------------------------------------------------

    def hops(self, query: int) -> np.ndarray:
        """int [n]: layers until `query` has read each key, -1 = never.

        Raises AttnSpecError where the pairs are not known, or too many to examine.
        """
        return reach.hops(self._influenced(), self.n, index_of("query", query))

    def told(self, key: int) -> np.ndarray:
        """int [n]: layers until each query has read `key`, what it can influence; -1 = never.

        Raises as `hops`.
        """
        return reach.told(self._influenced(), self.n, index_of("key", key))

    def path(self, query: int, key: int) -> Steps | None:
        """The steps (layer, head, position) of a shortest path, None for none; raises as `hops`."""
        ends = index_of("query", query), index_of("key", key)
        return reach.path(self._influenced(), self.n, *ends)

    def eccentricity(self, position: int) -> int | None:
        """The longest shortest path from a position to a key it may read; None where it never reads
        one of them; raises as `hops`."""
        place = index_of("position", position)
        return reach.eccentricity(self._influenced(), self.n, place).value

    def _influenced(self) -> Stack:
        if self.program.cross:
            raise AttnSpecError(f"a spec with `cross` has no paths: {APART}, and keys read nothing")
        if self.influence.unknown is not None:
            raise AttnSpecError(f"nothing is known of paths: {self.influence.unknown}")
        return self.influence

    def approximation(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layer: int = 0, head: int = 0
    ) -> dict[str, Figure[Any]]:
        """How far one head is from softmax attention on q, k [n, d] and v [n, d_v]:
        for favor, rbf, linformer, nystrom and lsh; in float64, n^2 numbers.

        Raises AttnSpecError for a head of another kind, ValueError for arrays that do not fit.
        """
        from attnspec.analysis.approximation.approximation import approximation

        if self.program.cross:
            raise AttnSpecError(f"`approximation` needs a spec of one sequence: {APART}")
        if len(q) != self.n:
            raise ValueError(f"q, k and v must have {self.n:,} rows, got {len(q):,}")
        return approximation(self.program, q, k, v, layer=layer, head=head)

    # --- heads and layers --------------------------------------------------------------------

    @property
    def per_head(self) -> dict[tuple[int, int], HeadCounts]:
        """The counts of every (layer, head) that has a graph and no mechanism; empty where they are
        not known."""
        try:
            return self.counts_by_head
        except (Unknown, TooMuch):
            return {}

    # --- as text and data ------------------------------------------------------------------------

    def to_dict(self, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The figures as plain data, each with its quality and a note; those of `names` alone."""
        chosen = self.default_names if names is None else names
        per_head = self.per_head if names is None else {}
        return {
            "name": self.program.name,
            **({} if self.m is None else {"m": self.m}),
            "n": self.n,
            "layers": self.program.layer_count,
            "heads": self.program.heads,
            "batch": self.shape.batch,
            "head_size": self.shape.head_dim,
            "figures": {name: data_of(self.figure(name)) for name in chosen},
            "per_head": [
                {"layer": layer, "head": head, **asdict(counts)}
                for (layer, head), counts in per_head.items()
            ],
        }

    def to_json(self, names: tuple[str, ...] | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(names), indent=2, allow_nan=False)

    def __str__(self) -> str:
        from attnspec.analysis.report.printed import page

        return page(self).plain

    def __repr__(self) -> str:
        return f"<Report {self.program.name}, {self.lengths}>"

    def _repr_html_(self) -> str:
        from attnspec.analysis.report.printed import html

        return html(self)


NAMES = tuple(Report.entries)
"""The figures by their names, in the order in which they are printed."""


def data_of(found: Figure[Any] | Unknown) -> dict[str, Any]:
    """A figure as plain data."""
    if isinstance(found, Unknown):
        return {"value": None, "quality": None, "note": found.reason}
    value = found.value
    if value is not None and not isinstance(value, bool | int | float | str):
        value = str(value)
    return {"value": value, "quality": found.quality, "note": found.note}

"""Everything that is asked of a spec at one length: figures that are computed when they are read.

Each is exact, a bound or an estimate; what is not known is None, with a reason. Figures over the
whole stack are attributes, those of single heads are in `per_head`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from attnspec.analysis.counting.head_counts import HeadCounts, LayerCounts
from attnspec.analysis.quality import Figure, Quality, Unknown
from attnspec.analysis.report import figure_table
from attnspec.analysis.report.inquiry import Inquiry
from attnspec.elaborate import Elaborated
from attnspec.graphs.stack import Sample, TooMuch
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    import sympy

    from attnspec.analysis.reach.reach import Steps
    from attnspec.elaborate import Elaborated

T = TypeVar("T")


class Qualities(Mapping[str, "Quality | None"]):
    """By the name of a figure how far it is to be trusted, None where it is not known."""

    def __init__(self, report: Inquiry) -> None:
        self._report = report

    def __getitem__(self, name: str) -> Quality | None:
        found = self._report.figure(name)
        return None if isinstance(found, Unknown) else found.quality

    def __iter__(self) -> Iterator[str]:
        return iter(figure_table.NAMES)

    def __len__(self) -> int:
        return len(figure_table.NAMES)


class Value(Generic[T]):
    """An attribute of a report: the value of the figure of its name, None where it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, report: None, owner: type) -> Value[T]: ...

    @overload
    def __get__(self, report: Report, owner: type) -> T | None: ...

    def __get__(self, report: Report | None, owner: type) -> Value[T] | T | None:
        if report is None:
            return self
        found = report.figure(self.name)
        value: T | None = None if isinstance(found, Unknown) else found.value
        return value


class Report(Inquiry):
    """The analysis of a spec at n positions; with `inputs`, one sample of its run-time inputs, the
    figures of that sample.

    Costs are those of one sample (B = 1) with heads of `head_size` in numbers of `element` bytes.
    """

    def __init__(
        self,
        elaborated: Elaborated,
        n: int,
        inputs: Sample | None = None,
        *,
        head_size: int = 64,
        element: int = 4,
    ) -> None:
        super().__init__(
            elaborated, n, inputs, figure_table.OF, head_size=head_size, element=element
        )

    @property
    def quality(self) -> Qualities:
        """By the name of a figure "exact", "bound" or "estimate", None where it is not known."""
        return Qualities(self)

    # the figures themselves: their values, None where they are not known

    edges = Value[int]()
    """The pairs of all layers and heads together."""

    density = Value[float]()
    """The pairs as a part of n * n * heads * layers."""

    degree = Value[int]()
    """The most keys of one query in one head."""

    min_degree = Value[int]()
    """The fewest keys of one query in one head."""

    mean_degree = Value[float]()
    """The mean number of keys of a query in a head."""

    graph_edges = Value[int]()
    """The pairs of the heads that have a graph and no mechanism, together."""

    graph_density = Value[float]()
    """These as a part of n * n for each such head."""

    graph_degree = Value[int]()
    """The most keys of one query in one such head."""

    graph_min_degree = Value[int]()
    """The fewest keys of one query in one such head."""

    readers = Value[int]()
    """The most queries that read one key in one head: the in-degree."""

    min_readers = Value[int]()
    """The fewest queries that read one key in one head."""

    empty_rows = Value[int]()
    """Queries without a key, in all heads of all layers."""

    unread_keys = Value[int]()
    """Keys that no query reads, in all heads of all layers."""

    unread_share = Value[float]()
    """The part of the keys that no other position reads, in the head that leaves most of them."""

    rows_nonempty = Value[bool]()
    """Whether every query has a key in every head."""

    causal = Value[bool]()
    """Whether no position learns of a later one through any number of layers."""

    stable = Value[bool]()
    """Whether row q is the same pairs at every n > q, in every head of every layer."""

    symmetric = Value[bool]()
    """Whether (q, k) implies (k, q) in every head."""

    order: Value[sympy.Expr] = Value()
    """How fast the edges grow with n, constant factors left out."""

    edges_formula: Value[sympy.Expr] = Value()
    """The edges as an expression in `sympy.Symbol("n")`, where one is known."""

    flops = Value[int]()
    """Operations of one layer, all heads, forward: 4 d for every pair that the plan computes,
    those masked out included; the most expensive layer counts."""

    useful_flops = Value[int]()
    """The same for the pairs of the graph alone."""

    backward_flops = Value[int]()
    """Operations of the backward pass of one layer: 8 d a pair, 10 d where scores are computed
    again."""

    bytes = Value[int]()
    """Bytes that the steps of one layer read and write, forward."""

    peak_memory = Value[int]()
    """Bytes held at one time, forward: q, k, v, the output and the temporaries of a layer."""

    intensity = Value[float]()
    """Operations for each byte moved, forward."""

    break_even = Value[int]()
    """The least length from which on the plan is estimated to beat dense attention."""

    kv_cache = Value[int]()
    """The most keys that one head of a causal spec must hold at one time of generation."""

    kv_cache_bytes = Value[int]()
    """Keys and values of all heads and layers that are held at one time, in bytes."""

    eviction = Value[str]()
    """When a key may leave the cache, in words, for each different graph."""

    diameter = Value[int]()
    """The longest shortest path between allowed pairs in the union of all layers and heads."""

    depth = Value[int]()
    """The fewest layers after which all allowed pairs are joined."""

    path_length = Value[float]()
    """The mean shortest path between allowed pairs in the union of all layers and heads."""

    spectral_gap = Value[float]()
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union."""

    mixing_steps = Value[int]()
    """Steps after which a random walk on that union is anywhere, None if it never is."""

    diameter_bound = Value[int]()
    """The diameter of that union that its eigenvalues leave possible, None for any."""

    star = Value[bool]()
    """Whether in every layer a position reads all and is read by all (BigBird's condition)."""

    universal = Value[bool]()
    """Whether the conditions of Yun et al. 2020 for a universal approximator hold."""

    # --- reach -----------------------------------------------------------------------------------

    def hops(self, query: int) -> np.ndarray:
        """int [n]: layers until `query` has read each key, -1 = never.

        Raises AttnSpecError where the pairs are not known, or too many to look at.
        """
        from attnspec.analysis.reach import reach

        self._require_known()
        return reach.hops(self.influence, self.n, query)

    def path(self, query: int, key: int) -> Steps | None:
        """The steps (layer, head, position) of a shortest path, None where there is none; raises
        as `hops`."""
        from attnspec.analysis.reach import reach

        self._require_known()
        return reach.path(self.influence, self.n, query, key)

    def eccentricity(self, position: int) -> int | None:
        """The longest shortest path from a position to a key it may read; None where it never reads
        one of them; raises as `hops`."""
        from attnspec.analysis.reach import reach

        self._require_known()
        return reach.eccentricity(self.influence, self.n, position).value

    def _require_known(self) -> None:
        if self.influence.unknown is not None:
            raise AttnSpecError(f"nothing is known of paths: {self.influence.unknown}")

    def approximation(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layer: int = 0, head: int = 0
    ) -> dict[str, Figure[Any]]:
        """How far one head is from softmax attention on q, k [n, d] and v [n, d_v], beside the
        bounds that are known: for favor, rbf, linformer, nystrom and lsh; in float64, n^2 numbers.

        Raises AttnSpecError for a head of another kind, ValueError for arrays that do not fit.
        """
        from attnspec.analysis.approximation.approximation import approximation

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

    @property
    def per_layer(self) -> dict[int, LayerCounts]:
        """The counts of every layer whose heads all have a graph and no mechanism; empty where they
        are not known."""
        layers: dict[int, list[HeadCounts]] = {}
        for (layer, _), counts in self.per_head.items():
            layers.setdefault(layer, []).append(counts)
        whole = {layer: len(row) for layer, row in enumerate(self.program.slots)}
        return {
            layer: LayerCounts(
                sum(counts.edges for counts in heads),
                max(counts.degree for counts in heads),
                min(counts.min_degree for counts in heads),
            )
            for layer, heads in layers.items()
            if len(heads) == whole[layer]
        }

    # --- as text and data ------------------------------------------------------------------------

    def to_dict(self, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The figures as plain data, each with its quality and a note; those of `names` alone."""
        chosen = figure_table.default_names(self) if names is None else names
        heads = [
            {"layer": layer, "head": head, **asdict(counts)}
            for (layer, head), counts in (self.per_head.items() if names is None else ())
        ]
        return {
            "name": self.program.name,
            "n": self.n,
            "layers": self.program.layer_count,
            "heads": self.program.heads,
            "head_size": self.head_size,
            "figures": {name: figure_table.data_of(self.figure(name)) for name in chosen},
            "per_head": heads,
        }

    def to_json(self, names: tuple[str, ...] | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(names), indent=2, allow_nan=False)

    def __str__(self) -> str:
        from attnspec.analysis.report.printed import page

        return page(self).plain

    def __repr__(self) -> str:
        return f"<Report {self.program.name}, n = {self.n:,}>"

    def _repr_html_(self) -> str:
        from attnspec.analysis.report.printed import html

        return html([self])

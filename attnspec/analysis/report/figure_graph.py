"""The figures of a report about the graph as a whole: spectrum, star, universality.

Each function raises Unknown, with the reason, where its figure is not known. Spectra and
bounds are those of the union of all layers and heads, every pair taken both ways.
"""

from __future__ import annotations

from math import ceil, exp, floor, log
from typing import TYPE_CHECKING, Any

from attnspec.analysis.counting.degrees import degrees_of, readers_of
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.spectrum import universality
from attnspec.analysis.spectrum.spectrum import Spectrum, spectrum
from attnspec.analysis.spectrum.undirected import own
from attnspec.graphs.edge_table import Drawn
from attnspec.graphs.operators import Union
from attnspec.graphs.relation import Relation

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry

NEAR = 0.25
"""How near to its end a walk is after `mixing_steps`, in total variation."""


def spectral_gap(report: Inquiry) -> Figure[Any]:
    """1 - |second eigenvalue|."""
    found = _spectrum(report)
    return Figure(found.gap, found.quality, found.note)


def mixing_steps(report: Inquiry) -> Figure[Any]:
    """Steps after which a random walk is anywhere, whatever its start: by the spectral gap and the
    least degree (Levin, Peres and Wilmer 2009, theorem 12.3)."""
    found = _spectrum(report)
    if found.gap <= 0 or not found.fewest:
        return Figure(None, note="a walk does not forget its start")
    steps = ceil(log(found.volume / found.fewest / NEAR) / found.gap)
    return Figure(steps, _bound(found), f"at most, to within {NEAR:g} of the whole")


def diameter_bound(report: Inquiry) -> Figure[Any]:
    """The diameter that the second eigenvalue leaves possible (Chung 1989)."""
    found = _spectrum(report)
    if found.gap <= 0 or not found.fewest:
        return Figure(None, note="a walk does not reach everything")
    rest = found.volume / found.fewest - 1
    if found.n == 1 or found.slowest == 0:
        return Figure(min(found.n - 1, 1), "bound", "at most, pairs taken both ways")
    steps = max(1, floor(log(rest) / -log(found.slowest)) + 1) if rest > 1 else 1
    return Figure(steps, _bound(found), "at most, pairs taken both ways")


def _bound(found: Spectrum) -> Any:
    """A bound by an eigenvalue that may be larger than what was found is an estimate."""
    return "bound" if found.quality == "exact" else "estimate"


def _spectrum(report: Inquiry) -> Spectrum:
    return spectrum(report.stack, _positions(report))


def star(report: Inquiry) -> Figure[Any]:
    """Whether a position reads all and is read by all, in every layer."""
    return universality.star(report.stack, _positions(report))


def unread_share(report: Inquiry) -> Figure[Any]:
    """The part of the keys that no other position reads, in the head that leaves most of them; for
    drawn graphs with what is expected."""
    n = _positions(report)
    worst, drawn, degree = 0.0, False, 0.0
    for _, _, relation in report.graphs:
        others = readers_of(relation, n) - own(relation, n)
        share = float((others == 0).mean())
        if share >= worst:
            worst, drawn = share, _is_drawn(relation)
            degree = float((degrees_of(relation, n) - own(relation, n)).mean())
    if not drawn:
        return Figure(worst)
    return Figure(worst, note=f"{exp(-degree):.3g} is expected of as many random keys a query")


def _is_drawn(relation: Relation) -> bool:
    return isinstance(relation, Drawn) or (
        isinstance(relation, Union) and any(isinstance(term, Drawn) for term in relation.terms)
    )


def universal(report: Inquiry) -> Figure[Any]:
    """Whether Yun's sufficient conditions hold."""
    return universality.universal(report.stack, _positions(report))


def _positions(report: Inquiry) -> int:
    # raises Unknown where the pairs are not known
    _ = report.graphs
    if not report.length:
        raise Unknown("there is no position")
    return report.length

"""The figures of a report about the graph as a whole: spectrum, small world, universality.

Each function raises Unknown, with the reason, where its figure is not known. Spectra, bounds and
clustering are those of the union of all layers and heads, every pair taken both ways.
"""

from __future__ import annotations

from math import ceil, floor, log, sqrt
from typing import TYPE_CHECKING, Any

from attnspec.analysis import small_world, universality
from attnspec.analysis.quality import Figure
from attnspec.analysis.spectrum import Spectrum, spectrum
from attnspec.analysis.unknown import Unknown

if TYPE_CHECKING:
    from attnspec.analysis.report import Report

NEAR = 0.25
"""How near to its end a walk is after `mixing_steps`, in total variation."""


def spectral_gap(report: Report) -> Figure[Any]:
    """1 - |second eigenvalue|."""
    found = _spectrum(report)
    return Figure(found.gap, found.quality, found.note)


def conductance(report: Report) -> Figure[Any]:
    """The part of a set's pairs that leave it, for the set of at most half of all pairs that keeps
    most, by Cheeger's inequality."""
    found = _spectrum(report)
    apart = max(0.0, 1 - found.second)
    note = f"at least; at most {min(1.0, sqrt(2 * apart)):.4g} (Cheeger)"
    return Figure(apart / 2, _bound(found), note)


def mixing_steps(report: Report) -> Figure[Any]:
    """Steps after which a random walk is anywhere, whatever its start: by the spectral gap and the
    least degree (Levin, Peres and Wilmer 2009, theorem 12.3)."""
    found = _spectrum(report)
    if found.gap <= 0 or not found.fewest:
        return Figure(None, note="a walk does not forget its start")
    steps = ceil(log(found.volume / found.fewest / NEAR) / found.gap)
    return Figure(steps, _bound(found), f"at most, to within {NEAR:g} of the whole")


def diameter_bound(report: Report) -> Figure[Any]:
    """The diameter that the second eigenvalue leaves possible (Chung 1989)."""
    found = _spectrum(report)
    if found.gap <= 0 or not found.fewest:
        return Figure(None, note="a walk does not reach everything")
    rest = found.volume / found.fewest - 1
    if found.n == 1 or found.slowest == 0:
        return Figure(min(found.n - 1, 1), "bound", "at most, pairs taken both ways")
    steps = max(1, floor(log(rest) / -log(found.slowest)) + 1) if rest > 1 else 1
    return Figure(steps, _bound(found), "at most, pairs taken both ways")


def ramanujan(report: Report) -> Figure[Any]:
    """The second eigenvalue over 2 sqrt(k - 1) / k, which regular graphs of k neighbours cannot
    stay far below (Alon and Boppana) and random ones come close to (Friedman 2008)."""
    found = _spectrum(report)
    neighbours = found.volume / found.n
    if neighbours <= 1:
        raise Unknown("there are too few pairs for an expander")
    best = 2 * sqrt(neighbours - 1) / neighbours
    note = f"1 is about the best with {neighbours:,.4g} neighbours each"
    return Figure(found.slowest / best, found.quality, note)


def _bound(found: Spectrum) -> Any:
    """A bound by an eigenvalue that may be larger than what was found is an estimate."""
    return "bound" if found.quality == "exact" else "estimate"


def _spectrum(report: Report) -> Spectrum:
    return spectrum(report.stack, _positions(report))


def clustering(report: Report) -> Figure[Any]:
    """The mean clustering coefficient."""
    return small_world.clustering(report.stack, _positions(report))


def star(report: Report) -> Figure[Any]:
    """Whether a position reads all and is read by all, in every layer."""
    return small_world.star(report.stack, _positions(report))


def unread_share(report: Report) -> Figure[Any]:
    """The part of the keys that no other position reads, in the worst head."""
    return small_world.unread_share(report.stack, _positions(report))


def universal(report: Report) -> Figure[Any]:
    """Whether Yun's sufficient conditions hold."""
    return universality.universal(report.stack, _positions(report))


def _positions(report: Report) -> int:
    # raises Unknown where the pairs are not known
    _ = report.graphs
    if not report.n:
        raise Unknown("there is no position")
    return report.n

"""The figure of a report about the graph as a whole: its spectral gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.spectrum.spectrum import spectrum

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry


def spectral_gap(report: Inquiry) -> Figure[Any]:
    """1 - |second eigenvalue| of the union of all layers and heads, every pair taken both ways;
    raises Unknown where the pairs are not known."""
    _ = report.graphs
    if not report.length:
        raise Unknown("there is no position")
    found = spectrum(report.stack, report.length)
    return Figure(found.gap, found.quality, found.note)

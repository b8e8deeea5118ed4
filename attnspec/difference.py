"""Two specs compared, as users ask for it."""

from __future__ import annotations

from attnspec.check.compare import compare
from attnspec.graphs.stack import Sample
from attnspec.show.differences import Difference
from attnspec.spec import Spec

__all__ = ["Difference", "diff"]


def diff(
    a: Spec, b: Spec, n: int, inputs: Sample | None = None, m: int | None = None
) -> Difference:
    """The pairs that only one of two specs has at n positions, for each layer and head.

    A spec that declares no layers, or heads, is compared with every one of the other. `inputs` is
    one sample of the run-time inputs, for both. Of specs with `cross` n are the keys and m, n if it
    is not given, the queries. Raises TypeError for what is no spec, SpecError
    where a size has no value at n, and AttnSpecError for a length that one of them does not have
    or for an input that neither declares.
    """
    for spec in (a, b):
        if not isinstance(spec, Spec):
            raise TypeError(f"specs are compared, got {type(spec).__name__}")
    found = compare(a.elaborated, b.elaborated, n, inputs, m)
    return Difference(found.a, found.b, found.n, found.compared, found.notes)

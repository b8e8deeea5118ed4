"""What is looked at of a long sequence: as much as memory and patience allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnspec.banding import bands_of, seconds_of
from attnspec.diagnostics import AttnSpecError
from attnspec.planning import choose
from attnspec.rates import dense_seconds
from attnspec.relations import Relation
from attnspec.target import Work

EXHAUSTIVE = 4096
"""The longest sequence whose pairs are all looked at."""

LONGEST = 1 << 20
"""The longest sequence that is looked into."""

WEIGHED = 1 << 28
"""The most pairs of all heads whose weights are looked at one by one: 2 GiB of them."""

LAID_OUT = 5.0
"""Seconds that the forward of a head may be estimated to take for its layout to be built."""

RUN = 20.0
"""Seconds that the forward of all heads may be estimated to take for it to be run."""

POSITIONS = 1 << 21
"""The most positions, counted for each head, whose outputs and gradients are computed."""

DENSE = 1 << 27
"""The most pairs of a head for which every score is computed: a mask of 1 GiB in float64."""


class TooLong(AttnSpecError):
    """A sequence that is too long for what would run it."""


@dataclass(frozen=True)
class Chosen:
    """What runs a work, and the estimate for one head."""

    backend: str
    seconds: float


def chosen_for(work: Work, relation: Relation, backend: str, forced: bool) -> Chosen:
    """What runs a work whose inputs make it this relation; `forced` where bands run whatever they
    cost. Raises TooLong where building it, or its mask, is not affordable."""
    found = choose(work, "cpu", backend)
    name = found.name
    if work.reads and name == "bands":
        seconds = seconds_of(bands_of(relation, work.n_q, work.n_k), work.n_q)
        if not forced and seconds > dense_seconds(work):
            name, seconds = "dense", dense_seconds(work)
    else:
        seconds = found.cost(replace(work, relation=relation, reads=()) if work.reads else work)
    if work.n_k > EXHAUSTIVE:
        pairs = work.n_q * work.n_k
        if name == "dense" and pairs > DENSE:
            raise TooLong(
                f"n = {work.n_k:,} is too long for the backend dense, which computes every score:"
                f" up to {DENSE:,} are allowed, and there are {pairs:,}"
            )
        if not seconds <= LAID_OUT:
            raise TooLong(
                f"n = {work.n_k:,} is too long for the backend {name}: a head is estimated to take"
                f" {seconds:,.3g} s, and {LAID_OUT:,.3g} s are allowed"
            )
    return Chosen(name, seconds)

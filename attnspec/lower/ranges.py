"""Lengths that share a plan: what runs at one of them, and in which steps, is chosen at the longest
of its range, so that sequences of many lengths need few choices."""

from __future__ import annotations

from dataclasses import replace

from attnspec.graphs.relation import Relation, is_of_any_length
from attnspec.lower.work import Work

RANGES = 8
"""Ranges of lengths between a power of two and the next."""

OWN = 256
"""Positions up to which every length is planned by itself."""


def planned_length(relation: Relation, n_q: int, n_k: int) -> int:
    """The length at which a relation is planned for n_k: the longest of its range, n_k itself where
    queries are the last ones alone or the relation has a length of its own."""
    if n_q != n_k or n_k <= OWN or not is_of_any_length(relation):
        return n_k
    return longest_of(n_k)


def longest_of(n: int) -> int:
    """The longest sequence of the range of n; the shortest are one range."""
    if n <= OWN:
        return OWN
    step = (1 << (n.bit_length() - 1)) // RANGES
    return -(-n // step) * step


def as_planned(work: Work) -> Work:
    """A work at the length at which it is planned; that of a mechanism is its own."""
    n = work.n_k if work.mechanism else planned_length(work.relation, work.n_q, work.n_k)
    return work if n == work.n_k else replace(work, n_q=n, n_k=n)

"""Lengths that share a plan: what runs at one of them, and in which steps, is chosen at the longest
of its range, so that sequences of many lengths need few choices. Heads that differ in what they
draw share that of the first, too."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attnspec.graphs.relation import Relation, heads_in, is_of_any_length, with_head
from attnspec.limits import LIMITS
from attnspec.lower.work import Work

RANGES = 8
"""Ranges of lengths between a power of two and the next."""


def planned_length(relation: Relation, n_q: int, n_k: int) -> int:
    """The length at which a relation is planned for n_k: the longest of its range, n_k itself where
    queries are the last ones alone or the relation has a length of its own."""
    if n_q != n_k or n_k <= LIMITS.planned_alone or not is_of_any_length(relation):
        return n_k
    return longest_of(n_k)


def longest_of(n: int) -> int:
    """The longest sequence of the range of n; the shortest are one range."""
    if n <= LIMITS.planned_alone:
        return LIMITS.planned_alone
    step = (1 << (n.bit_length() - 1)) // RANGES
    return -(-n // step) * step


def as_planned(work: Work) -> Work:
    """A work at the length and with the draws at which it is planned; that of a mechanism is its
    own."""
    if work.mechanism:
        return work
    n = planned_length(work.relation, work.n_q, work.n_k)
    relation, _ = drawn_alike(work.relation)
    if n == work.n_k:
        return work if relation is work.relation else replace(work, relation=relation)
    return replace(work, relation=relation, n_q=n, n_k=n)


@lru_cache(maxsize=256)
def drawn_alike(relation: Relation) -> tuple[Relation, int | None]:
    """The relation of which heads that differ in what they draw share a plan, that of the first
    one, and whose draws these are, None for its own."""
    head = max(heads_in(relation), default=0)
    if not head:
        return relation, None
    first = with_head(relation, 0)
    return (first, head) if with_head(first, head) == relation else (relation, None)

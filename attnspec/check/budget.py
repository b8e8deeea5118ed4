"""Whether a claim on reach holds, for as many pairs as may be looked at and no more."""

from __future__ import annotations

import math

from attnspec.analysis.reach import bitsets
from attnspec.analysis.reach.chain import Chain, layers_of, union_of
from attnspec.analysis.reach.period import period
from attnspec.analysis.reach.spans import spans_of
from attnspec.analysis.reach.spread import FEW_QUERIES, spread
from attnspec.check.counterexamples import COMPARE
from attnspec.check.places import values
from attnspec.graphs.stack import Stack
from attnspec.ir.program import Claim
from attnspec.ir.scalars import evaluate

PASS_COST = 1 << 4
"""Pairs for which a pass over one layer counts, for each position."""


def joins(stack: Stack, claim: Claim, n: int, budget: int) -> tuple[bool, int]:
    """Whether a claim on reach holds, without a look at layers beyond those that decide it, and
    about how many pairs were looked at; what `budget` pairs do not decide counts as not holding."""
    given = [evaluate(value, stack.situation(n).values) for value in values(claim, stack)]
    if not all(isinstance(value, int | float) for value in given):
        return False, 0
    value = float(min(given))
    union = claim.kind in ("diameter", "path_length")
    chain = union_of(stack, n) if union else layers_of(stack, n)
    most = math.ceil(value) - 1 if claim.compare == "<" else math.floor(value)
    if most < 0:
        return False, 0
    price = price_of_layer(chain)
    affordable = max(0, budget) // price
    if claim.kind == "path_length":
        return mean_within(chain, claim.compare or "<=", value, affordable, price)
    if affordable < 1:
        return False, budget
    found = spread(chain, min(most, affordable))
    holds = found.after(most)[0] == 0
    undecided = not holds and most > affordable == len(found.missing) - 1
    return holds, budget if undecided else price * len(found.missing)


def mean_within(
    chain: Chain, compare: str, value: float, affordable: int, price: int
) -> tuple[bool, int]:
    """The same of the mean shortest path, which is at least what the first layers leave missing."""
    most, cost = max(1, math.ceil(value)), 0
    while cost + most * price <= affordable * price:
        found = spread(chain, most)
        cost += price * len(found.missing)
        mean = sum(found.missing) / max(1, found.pairs - found.own)
        if found.layers is not None:
            return COMPARE[compare](mean, value), cost
        if mean > value or len(found.missing) <= most:
            # too far already, or some pair is never joined
            return False, cost
        most *= 2
    return False, affordable * price


def price_of_layer(chain: Chain) -> int:
    """About how many pairs one more layer looks at, at least 1: what takes as long as one band does
    for each pair of positions counts once for it."""
    n = chain.n
    if spans_of(chain) is not None:
        return PASS_COST * n
    repeats = period(chain)
    if repeats is not None and repeats <= FEW_QUERIES:
        # a few queries, each followed through all layers below
        return PASS_COST * n * repeats * chain.distinct
    passes = (bitsets.pairs_per_pass(chain.graph(layer)) for layer in range(chain.distinct))
    # a graph may have no pairs at all
    return max(1, *passes)

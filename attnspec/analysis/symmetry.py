"""After how many positions a causal graph repeats itself.

Where (q, k) -> (q + p, k + p) maps every layer's pairs onto pairs, as far as they stay inside the
sequence, hops from q to k are those from q + p to k + p. In general the two ends of the sequence
spoil this: a path may run past the end that the moved one cannot reach. With k <= q in every
layer it cannot, because every position on a path from q to k lies between k and q. So for causal
specs, and for them alone, the queries of the last period stand for all.
"""

from __future__ import annotations

from math import lcm

from attnspec.algebra import Complement, Intersection, Transpose, Union
from attnspec.analysis.chain import Chain
from attnspec.patterns.block import Block
from attnspec.patterns.causal import Causal
from attnspec.patterns.columns import Columns
from attnspec.patterns.dilated import Dilated
from attnspec.patterns.fixed import Fixed
from attnspec.patterns.full import Full
from attnspec.patterns.global_ import Global
from attnspec.patterns.powers import Powers
from attnspec.patterns.residue import Residue
from attnspec.patterns.rows import Rows
from attnspec.patterns.self import Self
from attnspec.patterns.strided import Strided
from attnspec.patterns.summary import Summary
from attnspec.patterns.window import Window
from attnspec.relations import Relation
from attnspec.tokens import Every

_BY_DISTANCE = (Causal, Dilated, Full, Powers, Residue, Self, Strided, Window)
"""Patterns of q - k alone."""


def period(chain: Chain) -> int | None:
    """The least known p for which moving a pair by p positions changes nothing, or None."""
    if not chain.causal:
        return None
    periods = [_period(relation) for relations in chain.layers for relation in relations]
    known = [one for one in periods if one is not None]
    return lcm(*known) if len(known) == len(periods) else None


def _period(relation: Relation) -> int | None:
    if isinstance(relation, _BY_DISTANCE):
        return 1
    if isinstance(relation, Block):
        return relation.size
    if isinstance(relation, Summary | Fixed):
        return relation.stride
    if isinstance(relation, Rows | Columns | Global):
        tokens = relation.tokens
        whole = isinstance(tokens, Every) and tokens.offset < tokens.step
        return tokens.step if isinstance(tokens, Every) and whole else None
    if isinstance(relation, Complement | Transpose):
        return _period(relation.term)
    if isinstance(relation, Union | Intersection):
        parts = [_period(term) for term in relation.terms]
        known = [part for part in parts if part is not None]
        return lcm(*known) if len(known) == len(parts) else None
    return None

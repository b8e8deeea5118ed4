"""Instances of each static pattern that between them reach every branch of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.graphs.patterns.axial import Axial
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.columns_rows import Columns, Rows
from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.patterns.expander import Expander
from attnspec.graphs.patterns.fixed import Fixed
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.neighborhood import Neighborhood
from attnspec.graphs.patterns.powers import Powers
from attnspec.graphs.patterns.prefix import Prefix
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.patterns.self import Self
from attnspec.graphs.patterns.strided import Strided
from attnspec.graphs.patterns.summary import Summary
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.where_inputs import WhereInputs
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.predicates.inputs import reading
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import (
    Data,
    Every,
    First,
    InputTokens,
    Last,
    Positions,
    TokenComplement,
    TokenIntersection,
    TokenUnion,
)
from attnspec.ir.scalars import Apply, Symbol

_AT = np.arange(512)
_CELLS = ((1, 1), (4, 1), (5, 2), (8, 8), (16, 3), (3, 100), (1000, 900))


def samples_of(pattern: type[Relation]) -> list[Relation]:
    """The instances of a pattern; none of one that tensors decide."""
    return SAMPLES.get(pattern, [])


def _where() -> Iterator[Where]:
    q, k, n = Symbol("q"), Symbol("k"), Symbol("n")
    gap = Apply("-", (q, k))
    yield Where(True)
    yield Where(False)
    yield Where(Apply("<=", (Apply("abs", (gap,)), Apply("isqrt", (n,)))))
    yield Where(Apply("<", (Apply("%", (gap, Apply("max", (n, 1)))), 3)))
    yield Where(Apply("one_of", (Apply("abs", (gap,)), 1, 2, 4)))
    yield Where(Apply("within", (Apply("+", (q, k)), 3, Apply("//", (n, 2)))))
    blocks = Apply("==", (Apply("//", (q, 4)), Apply("//", (k, 4))))
    yield Where(Apply("and", (blocks, Apply("not", (Apply("==", (Apply("%", (k, 3)), 1)),)))))
    yield Where(Apply("or", (Apply("<", (Apply("*", (q, k)), n)), Apply("!=", (q, k)))))
    yield Where(Apply("<", (Apply("sqrt", (q,)), Apply("/", (k, 2)))))
    yield Where(Apply("==", (Apply("%", (Apply("**", (q, 2)), 5)), Apply("%", (k, 5)))))
    # bounds far above 2**62, values below it for n <= 200
    large = Apply("*", (Apply("**", (k, 8)), Apply("-", (Apply("+", (q, 1)), q))))
    yield Where(Apply("==", (Apply("%", (large, 3)), 1)))
    row, col = (Apply("-", (Symbol(f"q.{a}"), Symbol(f"k.{a}"))) for a in ("row", "col"))
    near = Apply("<=", (Apply("+", (Apply("abs", (row,)), Apply("abs", (col,)))), 2))
    yield Where(near, (5, 7))
    yield Where(near, (6, 4), 3)
    time = Apply(">=", (Symbol("q.time"), Symbol("k.time")))
    yield Where(Apply("and", (time, near)), (3, 4, 5), 1)
    yield Where(Apply("==", (Symbol("k.col"), 0)), (5, 7), 2)


def _where_inputs() -> Iterator[WhereInputs]:
    steps, waves = Data(_AT // 5), Data(np.sin(_AT) * 4)
    holes = Data(np.where(_AT % 7 == 3, np.nan, np.where(_AT % 11, 1.0, np.inf)))
    t_q, t_k, u_q, u_k = (reading(name, side) for name in "tu" for side in "qk")
    gap = Apply("-", (t_q, t_k))
    yield WhereInputs(Apply("<=", (t_k, t_q)), (steps,))
    yield WhereInputs(Apply("<", (t_k, t_q)), (waves,))
    yield WhereInputs(Apply("<=", (Apply("abs", (gap,)), 3)), (steps,))
    yield WhereInputs(Apply("<=", (Apply("abs", (gap,)), 1.5)), (waves,))
    yield WhereInputs(Apply("!=", (t_k, t_q)), (holes,))
    yield WhereInputs(Apply("not", (Apply("<=", (gap, 0)),)), (holes,))
    yield WhereInputs(Apply("one_of", (gap, 0, 2, 5)), (Data(_AT * _AT % 11),))
    yield WhereInputs(Apply("==", (Apply("%", (t_q, 4)), Apply("%", (t_k, 4)))), (steps,))
    larger = Apply("max", (t_q, u_k))
    yield WhereInputs(Apply("within", (larger, 0, Apply("/", (Symbol("n"), 9)))), (steps, waves))
    both = Apply("or", (Apply("<", (t_q, 3)), Apply("<=", (Apply("min", (u_k, 2)), u_q))))
    yield WhereInputs(both, (steps, waves))
    distance = Apply("-", (Symbol("q"), Symbol("k")))
    yield WhereInputs(Apply("<", (distance, Apply("**", (t_k, 2)))), (steps,))
    length = reading("t", "")
    yield WhereInputs(Apply("<", (Symbol("k"), length)), (Data(np.int64(7)),))
    quarter = Apply("//", (Symbol("q"), 4))
    yield WhereInputs(Apply("==", (quarter, Apply("%", (length, 5)))), (Data(9),))
    near = Apply("<=", (Apply("abs", (Apply("-", (Symbol("q.row"), Symbol("k.row"))),)), t_q))
    yield WhereInputs(near, (Data(_AT % 3),), (5, 7), 2)


_COLUMNS = (
    First(3),
    Last(200),
    Every(7, 0),
    Positions(((0, 0), (5, 9), (100, 120))),
    TokenUnion((First(2), Last(2))),
)
_ROWS = (First(0), First(3), Last(2), Every(4, 1), TokenComplement(First(5)))
_GLOBAL = (
    First(0),
    First(4),
    Last(3),
    Every(5, 2),
    Positions(((2, 2), (9, 40))),
    TokenUnion((First(2), Last(2))),
    TokenIntersection((Every(2, 0), TokenComplement(First(9)))),
    InputTokens(Data(np.isin(_AT, (0, 3, 4, 130, 131)))),
)

SAMPLES: dict[type[Relation], list[Relation]] = {
    Axial: [
        *(Axial(extents) for extents in ((5, 7), (3, 4, 5))),
        Axial((9, 4), 3),
        Axial((1, 6), 1),
        Axial((2, 5, 3), 2),
    ],
    Block: [
        *(Block(*each) for each in ((1, 0, 0), (3, 0, 0), (4, 1, 0), (5, 0, 2), (16, 1, 1))),
        Block(1000),
        Block(7, 1000, 1000),
    ],
    Causal: [Causal()],
    Columns: [Columns(tokens) for tokens in _COLUMNS],
    Rows: [Rows(tokens) for tokens in _ROWS],
    Dilated: [
        Dilated(*each)
        for each in ((0, 1), (0, 5), (4, 1), (4, 5), (6, 3), (7, 3), (100, 8), (1000, 2))
    ],
    Expander: [
        Expander(2),
        Expander(4, seed=9, layer=3, head=1),
        Expander(6, per_head=False, layer=3),
    ],
    Fixed: [Fixed(*each) for each in _CELLS],
    Full: [Full()],
    Global: [Global(tokens) for tokens in _GLOBAL],
    Neighborhood: [
        Neighborhood((3, 3), (5, 7)),
        Neighborhood((1, 5), (9, 4), 3),
        Neighborhood((5, 3), (2, 11), 1),
        Neighborhood((7, 7), (7, 8)),
        Neighborhood((3, 1, 3), (3, 4, 5)),
        Neighborhood((1, 3, 5), (4, 3, 3), 2),
    ],
    Powers: [Powers(base) for base in (2, 3, 7, 1000)],
    Prefix: [*(Prefix(length) for length in (0, 1, 5, 1000, Data(np.int64(7)), Data(9)))],
    Random: [
        Random(0),
        Random(3),
        Random(5, seed=2**64 - 1, layer=2, head=7),
        Random(4, seed=1, causal=True),
        Random(1000, per_head=False, layer=1),
        Random(1000, causal=True),
    ],
    RandomBlocks: [
        RandomBlocks(4, 0),
        RandomBlocks(1, 2),
        RandomBlocks(5, 2, seed=3, layer=1, head=1),
        RandomBlocks(16, 3, per_head=False, head=4),
        RandomBlocks(7, 1000),
        RandomBlocks(1000, 1),
        RandomBlocks(5, 2, seed=3, layer=1, head=1, causal=True),
        RandomBlocks(7, 1000, causal=True),
    ],
    Residue: [Residue(step) for step in (1, 2, 3, 7, 64, 1000)],
    Same: [
        Same(Data(labels))
        for labels in (_AT // 7, np.zeros(512, np.int64), _AT * _AT % 11, -(_AT // 50) % 3)
    ],
    Self: [Self()],
    Strided: [Strided(stride) for stride in (1, 2, 3, 8, 13, 1000)],
    Summary: [Summary(*each) for each in _CELLS],
    Where: [*_where()],
    WhereInputs: [*_where_inputs()],
    Window: [
        *(Window(radius=radius) for radius in (0, 1, 3, 70, 1000)),
        *(Window(before=b, after=a) for b, a in ((0, 0), (5, 0), (0, 2), (4, 9))),
    ],
}

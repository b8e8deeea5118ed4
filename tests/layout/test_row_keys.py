"""The keys of single queries, by set algebra, against the definition."""

from __future__ import annotations

from attnspec.backends.common.labels import ALL, possible
from attnspec.backends.rows.keys import RowLayout, known_keys, row_keys, row_layout
from attnspec.graphs.operators import Intersection, Shift, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.token_sets import InputTokens, StandIn
from attnspec.ir.scalars import Apply, Symbol
from attnspec.lower.work import Work


def test_operators_of_ranges_stay_ranges() -> None:
    window = Window(before=9, after=0)
    step = Residue(5)
    causal = Causal()
    assert row_keys(Intersection((window, causal)), 50, 100) == [range(41, 51)]
    assert row_keys(Intersection((Union((window, step)), causal)), 50, 100) == [
        range(0, 41, 5),
        range(41, 51),
    ]
    assert row_keys(Shift(window, 3), 50, 100) == [range(41, 51)]
    assert row_keys(Shift(window, 3), 1, 100) == []
    assert known_keys(Where(True), 3, 100) == [range(100)]
    unknown = Apply("==", (Apply("%", (Apply("*", (Symbol("q"), Symbol("k"))), 7)), 1))
    assert known_keys(Where(unknown), 3, 100) is None


# --- layouts -------------------------------------------------------------------------------------


def test_what_reads_inputs_is_bounded_by_what_does_not() -> None:
    marked = Global(InputTokens(StandIn("t")))
    window, causal = Window(radius=3), Causal()
    assert possible(window) is window
    assert possible(marked) == ALL
    assert possible(Union((window, marked))) == ALL
    assert possible(Intersection((window, marked))) is window
    both = Intersection((Union((window, marked)), window, causal))
    assert possible(both) == Intersection((window, causal))
    work = Work(Intersection((window, marked)), 1, 100, reads=("t",))
    assert row_layout(work).keys == [range(96, 100)]
    work = Work(Union((window, marked)), 1, 100, reads=("t",))
    assert row_layout(work).keys == [range(100)]


def test_layouts_are_shared_and_few() -> None:
    window = Window(radius=3)
    first = row_layout(Work(window, 1, 100))
    assert isinstance(first, RowLayout)
    assert row_layout(Work(Window(radius=3), 1, 100, scale=2.0)) is first

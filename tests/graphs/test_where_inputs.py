"""Predicates that read run-time inputs, against what they say, written out in numpy or Python."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import attnspec
from attnspec.graphs.bind import bind, situation_of
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import EMPTY, FULL, SOME, Tiles
from attnspec.graphs.token_sets import Data
from attnspec.ir.program import leaves
from attnspec.text.diagnostics import AttnSpecError

Array = np.ndarray
Meant = Callable[[Array, Array, Array, Array, Array, Array], Array]

PREDICATES: dict[str, Meant] = {
    "t(k) <= t(q)": lambda q, k, tq, tk, dq, dk: tk <= tq,
    "0 <= t(q) - t(k) <= 2.5": lambda q, k, tq, tk, dq, dk: (tq - tk >= 0) & (tq - tk <= 2.5),
    "t(q) != t(k)": lambda q, k, tq, tk, dq, dk: tq != tk,
    "not (t(k) < t(q)) and q - k < 9": lambda q, k, tq, tk, dq, dk: ~(tk < tq) & (q - k < 9),
    "d(q) == d(k) or abs(t(q) - t(k)) < 0.5": lambda q, k, tq, tk, dq, dk: (
        (dq == dk) | (abs(tq - tk) < 0.5)
    ),
    "d(q) // 3 == d(k) // 3 and k <= q": lambda q, k, tq, tk, dq, dk: (
        (dq // 3 == dk // 3) & (k <= q)
    ),
    "d(k) in {1, 4} or d(q) % 5 in 2..3": lambda q, k, tq, tk, dq, dk: (
        np.isin(dk, (1, 4)) | ((dq % 5 >= 2) & (dq % 5 <= 3))
    ),
    "floor(t(q)) == floor(t(k)) and ceil(t(q)) % 2 == 0": lambda q, k, tq, tk, dq, dk: (
        (np.floor(tq) == np.floor(tk)) & (np.ceil(tq) % 2 == 0)
    ),
    "max(t(q), t(k)) - min(t(q), t(k)) <= 1 / 2": lambda q, k, tq, tk, dq, dk: (
        np.maximum(tq, tk) - np.minimum(tq, tk) <= 0.5
    ),
    "t(q) * t(k) < t(q) / t(k)": lambda q, k, tq, tk, dq, dk: tq * tk < tq / tk,
    "d(q) ** 2 - q <= 3 * d(k) + n": lambda q, k, tq, tk, dq, dk: dq**2 - q <= 3 * dk + len(q),
    # true in float32, and not in float64
    "d(q) * 0.1 + d(k) * 0.2 == 0.3 or q == k": lambda q, k, tq, tk, dq, dk: (
        (dq * 0.1 + dk * 0.2 == 0.3) | (q == k)
    ),
    "d(q) / 10 + d(k) / 5 != 0.3": lambda q, k, tq, tk, dq, dk: dq / 10 + dk / 5 != 0.3,
    "q - k <= d(k) and not (d(q) == 2 and q > k)": lambda q, k, tq, tk, dq, dk: (
        (q - k <= dk) & ~((dq == 2) & (q > k))
    ),
}


def spec_of(predicate: str) -> attnspec.Spec:
    text = "attention a { input t: numbers  input d: ids  attend where(%s) }"
    return attnspec.parse(text % predicate)


def sample(n: int) -> dict[str, Array]:
    """Times with ties, NaN and infinities, and labels below and above 0."""
    chance = np.random.default_rng(n)
    times = np.round(chance.normal(size=n) * 3, 1)
    times[chance.random(n) < 0.1] = np.nan
    times[chance.random(n) < 0.05] = np.inf
    times[chance.random(n) < 0.05] = -np.inf
    return {"t": times, "d": chance.integers(-4, 9, n)}


def meant(predicate: str, given: dict[str, Array]) -> Array:
    n = len(given["t"])
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    t, d = given["t"], given["d"]
    with np.errstate(all="ignore"):
        held = PREDICATES[predicate](q, k, t[:, None], t[None], d[:, None], d[None])
    return np.broadcast_to(held, (n, n))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("predicate", PREDICATES)
def test_tiles_are_never_wrong(predicate: str) -> None:
    spec, n = spec_of(predicate), 131
    given = sample(n)
    graph = spec.program.attends[0].graph
    assert graph is not None
    data = {name: Data(values) for name, values in given.items()}
    relation = bind(graph, situation_of(spec.program, n, inputs=data))
    expected = meant(predicate, given)
    decided = 0
    for size in (1, 8, 40):
        starts = np.arange(0, n, size)
        ends = np.minimum(starts + size, n)
        found = relation.cover(Tiles(starts[:, None], ends[:, None]), Tiles(starts, ends), n)
        for row, column in np.ndindex(found.shape):
            part = expected[starts[row] : ends[row], starts[column] : ends[column]]
            if found[row, column] == FULL:
                assert part.all()
            elif found[row, column] == EMPTY:
                assert not part.any()
            decided += found[row, column] in (EMPTY, FULL)
    assert decided


def test_tiles_of_numbers_that_float64_rounds() -> None:
    """Whole numbers that it cannot tell apart decide no tile wrongly; of reals, which it has as
    they are, every pair of single tokens is decided."""
    near = np.array([0, 1, -1, 0, 2, 127, 129, 255, 257, 1023])
    whole = [near + 2**53, near - 2**53, near + 2**60, near[::-1] - 2**60, near * 2**40]
    meanings: dict[str, Callable[[Array, Array], Array]] = {
        "t(k) <= t(q)": np.less_equal,
        "t(k) < t(q)": np.less,
        "t(k) == t(q)": np.equal,
        "not (t(k) != t(q))": np.equal,
        "t(q) - t(k) in 0..200": lambda k, q: (q - k >= 0) & (q - k <= 200),
    }
    for text, compare in meanings.items():
        spec = spec_of(text)
        for given in (*whole, *(values.astype(float) * 2.0**200 for values in whole)):
            n = len(given)
            relation = spec.relation(n, inputs={"t": given})
            expected = compare(given[None], given[:, None])
            for size in (1, 3):
                starts = np.arange(0, n, size)
                ends = np.minimum(starts + size, n)
                found = relation.cover(
                    Tiles(starts[:, None], ends[:, None]), Tiles(starts, ends), n
                )
                blocks = [np.logical_and, np.logical_or]
                every, some = (
                    op.reduceat(op.reduceat(expected, starts, 0), starts, 1) for op in blocks
                )
                assert every[found == FULL].all(), (text, given)
                assert not some[found == EMPTY].any(), (text, given)
                assert size > 1 or given.dtype == int or (found != SOME).all(), (text, given)


@pytest.mark.parametrize("predicate", ["t(q) > 0", "t(k) > 0", "t(q) > t(k)", "t(q) > 0 and k > 1"])
def test_every_pair_has_an_answer_whichever_side_is_read(predicate: str) -> None:
    relation = spec_of(predicate).relation(5, inputs={"t": np.arange(5) - 2})
    q, k = np.arange(1, 5)[:, None], np.arange(5)[None]
    assert relation.holds(q, k, 5).shape == (4, 5)
    assert relation.holds(q, q, 5).shape == (4, 1)
    assert relation.holds(k, q, 5).shape == (4, 5)


@pytest.mark.parametrize(
    ("predicate", "anchored"),
    [
        ("t(k) <= t(q)", False),
        ("t(q) - t(k) in 0..2", False),
        ("t(q) > k", True),
        ("t(k) + q < 8", True),
        ("t(q) + t(k) < n", True),
    ],
)
def test_pairs_move_on_with_tokens_and_inputs_unless_positions_are_read(
    predicate: str, anchored: bool
) -> None:
    spec = spec_of(predicate)
    graph = spec.program.attends[0].graph
    assert graph is not None
    (leaf,) = leaves(graph)
    assert BY_NAME[leaf.pattern].anchors(dict(leaf.arguments)) == anchored
    times = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    here = spec.mask(8, inputs={"t": times})
    moved = spec.mask(11, inputs={"t": np.array([7, 1, 8, *times])})
    assert np.array_equal(moved[3:, 3:], here) != anchored


def test_whole_numbers_are_exact_beyond_float64() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(k) <= t(q)) }")
    near = 2**60 + np.array([0, 1, -1, 0, 1, 2, 2**59])
    expected = near[None] <= near[:, None]
    assert not np.array_equal(expected, near[None].astype(float) <= near[:, None].astype(float))
    q = torch.zeros(1, 1, len(near), 4)
    pairs = spec.compile().pairs(q, q, inputs={"t": torch.from_numpy(near)[None]})
    assert np.array_equal(pairs[0, 0].numpy(), expected)
    assert np.array_equal(spec.mask(len(near), inputs={"t": near}), expected)
    assert np.array_equal(spec.adjacency(len(near), inputs={"t": near}).toarray(), expected)


def test_differences_of_large_whole_numbers_are_exact() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(q) - t(k) in 0..2) }")
    stamps = 1_700_000_000_000_000_000 + np.array([0, 1, 2, 3, 4])
    gap = stamps[:, None] - stamps[None]
    assert np.array_equal(spec.mask(5, inputs={"t": stamps}), (gap >= 0) & (gap <= 2))


def test_what_would_not_be_exact_is_refused() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(q) * t(k) <= 9) }")
    large = np.full(4, 2**40)
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(AttnSpecError, match=r"2\*\*62"):
        spec.mask(4, inputs={"t": large})
    module = spec.compile()
    with pytest.raises(ValueError, match=r"`t`.* 2\*\*62"):
        module(q, q, q, inputs={"t": torch.from_numpy(large)[None]})
    pairs = module.pairs(q, q, inputs={"t": torch.from_numpy(large)[None].double()})
    assert not pairs.any()


@pytest.mark.parametrize("operator", ["//", "%"])
def test_reals_are_not_divided_as_whole_numbers(operator: str) -> None:
    spec = attnspec.parse(
        f"attention a {{ input t: numbers attend where(t(q) {operator} 2 == 0) }}"
    )
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(AttnSpecError, match=r"whole numbers.*floor"):
        spec.mask(3, inputs={"t": [0.0, 1.0, 2.0]})
    module = spec.compile()
    with pytest.raises(ValueError, match=r"whole numbers.*floor"):
        module(q, q, q, inputs={"t": torch.tensor([[0.0, 1.0, 2.0]])})
    assert spec.mask(3, inputs={"t": [0, 1, 2]}).any()
    whole = attnspec.parse(
        f"attention a {{ input t: numbers attend where(floor(t(q)) {operator} 2 == 0) }}"
    )
    expected = [True, operator == "//", False]
    assert whole.mask(3, inputs={"t": [0.0, 1.5, 3.0]})[:, 0].tolist() == expected


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16],
)
def test_every_type_is_compared_in_one(dtype: torch.dtype) -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(q) * t(k) > 16_000) }")
    values = torch.tensor([[100, 127, 126, 3]]).to(dtype)
    q = torch.zeros(1, 1, 4, 4)
    exact = [Fraction(x) for x in values[0].double().tolist()]
    expected = [[a * b > 16_000 for b in exact] for a in exact]
    assert spec.compile().pairs(q, q, inputs={"t": values})[0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(5, bool), "int or real"),
        (np.zeros(5, complex), "int or real"),
        (np.zeros((1, 5)), r"\[5\], got float64 \[1, 5\]"),
        (np.full(5, 2**63, np.uint64), "below 2"),
        (["a"] * 5, "int or real"),
    ],
)
def test_samples_that_do_not_fit(given: object, message: str) -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(k) <= t(q)) }")
    with pytest.raises(AttnSpecError, match=message):
        spec.mask(5, inputs={"t": given})  # type: ignore[dict-item]


def test_cells_of_a_grid_behind_other_tokens() -> None:
    text = "attention a { sequence grid(3, 4) extra_tokens 2 input t: numbers attend where(%s) }"
    spec = attnspec.parse(text % "not (q.row == k.row and t(k) <= t(q))")
    n, at = 14, np.arange(14)
    t, row, cell = at * 5 % 7, (at - 2) // 4, at >= 2
    held = ~((row[:, None] == row) & (t <= t[:, None])) & cell[:, None] & cell
    assert np.array_equal(spec.mask(n, inputs={"t": t}), held)
    assert np.array_equal(spec.adjacency(n, inputs={"t": t}).toarray(), held)


def test_what_reads_no_input_is_planned_as_ever() -> None:
    spec = attnspec.parse(
        "attention a { causal input t: numbers attend where(q - k < 4 and t(k) <= t(q)) }"
    )
    written = attnspec.parse(
        "attention a { causal input t: numbers attend where(t(k) <= t(q)) & where(q - k < 4) }"
    )
    assert spec == written
    assert spec.analyse(64).causal
    with pytest.raises(AttnSpecError, match="needs its input `t`"):
        spec.mask(8)


def test_inputs_are_bounds_until_they_are_given() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(t(k) <= t(q)) }")
    report = spec.analyse(32)
    assert report.edges is None
    assert not report.causal  # two tokens may have one time
    given = spec.analyse(32, inputs={"t": np.arange(32)})
    assert (given.edges, given.causal) == (32 * 33 // 2, True)
    falling = spec.analyse(32, inputs={"t": -np.arange(32.0)})
    assert (falling.edges, falling.causal) == (32 * 33 // 2, False)


def test_a_tile_in_which_0_is_divided_by_0_is_looked_into() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(abs(t(q) / t(k)) >= 0) }")
    given = {"t": np.array([0.0, 1.0, 3.0, 2.0] * 4)}
    tiles = Tiles(np.arange(16), np.arange(16) + 1)
    rows = Tiles(tiles.start[:, None], tiles.stop[:, None])
    relation = spec.relation(16, inputs=given)
    held = spec.mask(16, inputs=given)
    assert held[0, :2].tolist() == [False, True]
    assert (relation.cover(rows, tiles, 16)[held] > EMPTY).all()
    assert (relation.cover(rows, tiles, 16)[~held] < FULL).all()
    whole = Tiles(np.array([0]), np.array([16]))
    assert relation.cover(whole, whole, 16).tolist() == [SOME]

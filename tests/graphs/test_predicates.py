"""Predicates in every way of writing them: pairs, figures and kernels against the oracle."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from oracle.scalars import Invalid
from oracle.tree import Attention, Node, pattern, text
from population import spec_of
from specs import predicates, ten, token_sets
from sweeps import few
from views import FIGURES, PAIRS, Case, differing, times_weighed

from attnspec import AttnSpecError, Spec, parse

# what is examined pair by pair, and what is decided of a block as a whole
NAMES = (
    "mask",
    "adjacency",
    "block rows",
    *"edges degree readers symmetric depth hops told".split(),
)
ASKED = {name: {**PAIRS, **FIGURES}[name] for name in NAMES}

PREDICATES = """k <= q
q < k
abs(q - k) < 3
abs(q - k) == 4
abs(q - k) > 2
not (abs(q - k) <= 3)
3 > abs(2 * k - q)
abs(q - 2 * k) >= 5
abs(q - k) >= -1
(q - k) % 5 == 2
(q + k) % 5 == 1
(q - k) % 7 != 3
(q - k) % n <= 2
(q - k) % 3 <= 1
(q - k) % 4 in 1..2
(q - k) % 7 in {1, 3, 5}
(q + 3 * k) % 40 < 9
(q + 60 * k) % 3 >= 1
(q * k) % 5 == 2
(q - k) % 5 % 3 <= 1
(q + 2) // 4 == (k + 2) // 4
q // 3 // 4 - k // 12 <= 1
(7 - k % 8) // 2 == 1
q % 4 <= k % 6
q % 4 < k % 6 and k <= q
q % 4 == k % 4 and q * k < 50
k // 4 == (q // 4 + 1) % 3
k // 3 - q // 2 in {-1, 2}
5 <= q and (q - 5) // 3 == (k - 5) // 3
q // 3 - k // 5 == 1
q / 3 <= k / 2
q / 2 < k
q / 2 < k / 2
2 * q <= k + 7
3 * q <= 3 * k + 1
min(q, k + 2) <= k
q == k or q + k == 9
q - k in {1, 2, 4}
abs(q - k) in {1, 3}
q - k in -2..3
-(q - k) <= -2
k in 3..q
q * k < n
q * k in {0, 6}
q * k < 9 and k * q > 2
q * k < 50 or q == k
min(q, 7) <= k % 5
isqrt(q) == isqrt(k)
abs(q % 6 - k % 6) < 2
max(q, k) < 10
(q % 3 == 1) == (k % 2 == 0)
sqrt(q) < k / 2
q - k == 0.5
q + 0.1 < k + 0.9
abs(q - k) <= 2.5
log2(q + 1) <= k
(q - k) ** 2 < n
q + 9007199254740993 <= k + 9007199254740993
q < 5 and (k < 3 or not q == k)""".splitlines()

ON_A_GRID = """q.row == k.row
q.col // 2 == k.col // 2 and q.row == k.row
abs(q.row - k.row) + abs(q.col - k.col) <= 2
abs(q.row - k.row) <= 1 and abs(q.col - k.col) <= 2
q.row <= k.row or k > 5
not (q.row < k.row)
k.row == 2 and q > 4
(q.row - k.row) % 2 == 0
(q.col + k.col) % 6 >= 3
q.row - k.col in {0, 2}
k.row + k <= q.col
q.row + q.col == k.row + k.col""".splitlines()

AROUND = ("~%s", "shift(%s, by = 3)", "transpose(%s)", "%s & window(radius = 6)", "causal & %s")
GRIDS = (
    ("sequence grid(5, 7)", 35),
    ("sequence grid(4, 6) extra_tokens 3", 27),
    ("sequence grid(2, 3, 4) extra_tokens 1", 25),
)


def bodies() -> list[tuple[str, int]]:
    """Each predicate alone, and within another operator in turn."""
    found = []
    for at, predicate in enumerate(PREDICATES):
        graph = f"where({predicate})"
        found.append((f"{'causal ' * (at % 2)}attend {graph}", (40, 13)[at % 2]))
        found.append((f"attend {AROUND[at % len(AROUND)] % graph}", 40))
    for at, predicate in enumerate(ON_A_GRID):
        grid, n = GRIDS[at % 3]
        graph = (AROUND[at % 5] if at % 2 else "%s") % f"where({predicate})"
        found.append((f"{grid} attend {graph}", n))
    return found


@pytest.mark.parametrize("part", few(range(4), 4))
def test_predicates_mean_what_they_say(part: int) -> None:
    # the parts of every run, 0 and 3, have each predicate once
    for at, (body, n) in list(enumerate(bodies()))[part::4]:
        case = Case(spec_of(body), n)
        assert differing(case, ASKED) == [], body
        kernel = ("tables", "torch", "edges")[at // 4 % 3]
        times = times_weighed(case, kernel, 0)
        assert times is None or np.abs(times - case.masks[0]).max() < 1e-9, (kernel, body)


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("seed", few(range(3), 3))
def test_drawn_predicates_and_token_sets_mean_what_they_say(seed: int) -> None:
    def asked(predicate: Node, tokens: Node, n: int) -> None:
        graph = Node("g&", (pattern("where", predicate), pattern("global", tokens)))
        tree = Attention((Node("attend", (graph,)),))
        case = Case(parse(text(tree)), n, tree)
        try:
            case.masks  # noqa: B018
        except Invalid:
            return
        assert differing(case, ASKED) == []
        times = times_weighed(case, "tables", 0)
        assert times is None or np.abs(times - case.masks[0]).max() < 1e-9

    ten(asked, seed, predicates, token_sets, st.integers(1, 70))


READING = """t(k) <= t(q)
0 <= t(q) - t(k) <= 2.5
t(q) != t(k)
not (t(k) < t(q)) and q - k < 9
d(q) == d(k) or abs(t(q) - t(k)) < 0.5
d(q) // 3 == d(k) // 3 and k <= q
d(k) in {1, 4} or d(q) % 5 in 2..3
max(t(q), t(k)) - min(t(q), t(k)) <= 1 / 2
t(q) * t(k) < t(q) / t(k)
d(q) ** 2 - q <= 3 * d(k) + n
d(q) * 0.1 + d(k) * 0.2 == 0.3 or q == k
d(q) / 10 + d(k) / 5 != 0.3
q - k <= d(k) and not (d(q) == 2 and q > k)""".splitlines()
"""The two with 0.3 are other pairs in float32."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("predicate", READING)
def test_predicates_of_inputs_mean_what_they_say(predicate: str) -> None:
    """Times with ties, NaN and infinities, and labels below and above 0."""
    n, chance = 131, np.random.default_rng(131)
    times = np.round(chance.normal(size=n) * 3, 1) + 0.05
    for part, odd in ((0.1, np.nan), (0.05, np.inf), (0.05, -np.inf)):
        times[chance.random(n) < part] = odd
    case = Case(spec_of(f"input t: numbers input d: ids attend where({predicate})"), n)
    case.__dict__["inputs"] = {"t": times, "d": chance.integers(-4, 9, n)}
    asked = ("mask", "adjacency", "block rows", "edges", "degree", "symmetric")
    assert differing(case, {name: ASKED[name] for name in asked}) == []
    # labels that a longer sequence draws may be 0
    for kernel in ("tables", "dense") if "/ t" not in predicate else ():
        times_held = times_weighed(case, kernel, 0)
        assert times_held is None or np.abs(times_held - case.masks[0]).max() < 1e-9


def pairs_in_three_ways(spec: Spec, times: Any) -> list[list[list[bool]]]:
    """By the mask, the list of pairs and a module."""
    n = len(times)
    sample, q = {"t": times}, torch.zeros(1, 1, n, 4)
    drawn = spec.compile().pairs(q, q, inputs={"t": torch.as_tensor(times)[None]})
    held = spec.mask(n, inputs=sample), spec.adjacency(n, inputs=sample).toarray(), drawn[0, 0]
    return [each.tolist() for each in held]


@pytest.mark.parametrize(
    "predicate", ["t(k) <= t(q)", "t(k) < t(q)", "t(k) == t(q)", "t(q) - t(k) in 0..2"]
)
@pytest.mark.parametrize("base", [2**53, -(2**53), 2**60, 1_700_000_000_000_000_000])
def test_whole_numbers_are_exact_beyond_float64(predicate: str, base: int) -> None:
    times = base + np.array([0, 1, -1, 0, 2, 127, 129, 255, 257, 1023])
    spec = spec_of(f"input t: numbers attend where({predicate})")
    words = predicate.replace("in 0..2", "in (0, 1, 2)").replace("t(q)", "a").replace("t(k)", "b")
    meant = [[eval(words, {"a": a, "b": b}) for b in times.tolist()] for a in times.tolist()]
    assert pairs_in_three_ways(spec, times) == [meant] * 3


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]
)
def test_every_type_is_compared_in_one(dtype: torch.dtype) -> None:
    spec = spec_of("input t: numbers attend where(t(q) * t(k) > 16_000)")
    values = torch.tensor([[100, 127, 126, 3]]).to(dtype)
    q = torch.zeros(1, 1, 4, 4)
    exact = [Fraction(x) for x in values[0].double().tolist()]
    expected = [[a * b > 16_000 for b in exact] for a in exact]
    assert spec.compile().pairs(q, q, inputs={"t": values})[0, 0].tolist() == expected


def test_numbers_beyond_exact_arithmetic_are_refused() -> None:
    spec = spec_of("input t: numbers attend where(t(q) * t(k) <= 9)")
    large, q = np.full(4, 2**40), torch.zeros(1, 1, 4, 4)
    with pytest.raises(AttnSpecError, match=r"2\*\*62"):
        spec.mask(4, inputs={"t": large})
    module = spec.compile()
    with pytest.raises(ValueError, match=r"`t`.* 2\*\*62"):
        module(q, q, q, inputs={"t": torch.from_numpy(large)[None]})
    assert not module.pairs(q, q, inputs={"t": torch.from_numpy(large)[None].double()}).any()
    ninth = spec_of("attend where(q * k ** 9 < 0)")
    assert not ninth.mask(50).any()
    with pytest.raises(AttnSpecError, match=r"beyond 2\*\*62"):
        ninth.mask(300)


@pytest.mark.parametrize("operator", ["//", "%"])
def test_reals_are_not_divided_as_whole_numbers(operator: str) -> None:
    spec = spec_of(f"input t: numbers attend where(t(q) {operator} 2 == 0)")
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(AttnSpecError, match=r"integers.*floor"):
        spec.mask(3, inputs={"t": [0.0, 1.0, 2.0]})
    with pytest.raises(ValueError, match=r"integers.*floor"):
        spec.compile()(q, q, q, inputs={"t": torch.tensor([[0.0, 1.0, 2.0]])})
    assert spec.mask(3, inputs={"t": [0, 1, 2]}).any()
    whole = spec_of(f"input t: numbers attend where(floor(t(q)) {operator} 2 == 0)")
    expected = [True, operator == "//", False]
    assert whole.mask(3, inputs={"t": [0.0, 1.5, 3.0]})[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(5, bool), "int or real"),
        (np.zeros(5, complex), "int or real"),
        (np.zeros((1, 5)), r"\[5\], got float64 \[1, 5\]"),
        (np.full(5, 2**63, np.uint64), "below 2"),
        (["a"] * 5, "int or real"),
        (None, "needs its input `t`"),
    ],
)
def test_samples_that_do_not_fit(given: object, message: str) -> None:
    spec = spec_of("input t: numbers attend where(t(k) <= t(q))")
    with pytest.raises(AttnSpecError, match=message):
        spec.mask(5, inputs=None if given is None else {"t": given})  # type: ignore[dict-item]


def test_inputs_at_cells_of_a_grid_behind_other_tokens() -> None:
    spec = spec_of(
        "sequence grid(3, 4) extra_tokens 2 input t: numbers"
        " attend where(not (q.row == k.row and t(k) <= t(q)))"
    )
    case = Case(spec, 14)
    case.__dict__["inputs"] = {"t": np.arange(14) * 5 % 7}
    assert differing(case, {name: ASKED[name] for name in ("mask", "adjacency", "edges")}) == []


def test_a_pair_in_which_0_is_divided_by_0_is_none() -> None:
    spec = spec_of("input t: numbers attend where(abs(t(q) / t(k)) >= 0)")
    times = np.array([0.0, 1.0, 3.0, 2.0] * 4)
    with np.errstate(all="ignore"):
        meant = abs(times[:, None] / times) >= 0
    assert pairs_in_three_ways(spec, times) == [meant.tolist()] * 3


def test_inputs_are_bounds_until_they_are_given() -> None:
    spec = spec_of("input t: numbers attend where(t(k) <= t(q))")
    report = spec.analyse(32)
    assert report.edges is None
    assert not report.causal  # two tokens may have one time
    for times, causal in ((np.arange(32), True), (-np.arange(32.0), False)):
        told = spec.analyse(32, inputs={"t": times})
        assert (told.edges, told.causal) == (32 * 33 // 2, causal)


@pytest.mark.parametrize(
    "body",
    [
        "where(q // k == 1)",
        "where(q < 7 // (n - 5))",
        "where(q % (n - 5) == k)",
        "where(log2(q) <= k)",
        "where(isqrt(q - k) > 1)",
        "where(sqrt(q - k) > 1)",
    ],
)
def test_a_predicate_without_a_value_is_refused(body: str) -> None:
    spec = spec_of(f"attend {body}")
    for ask in (spec.mask, spec.adjacency, lambda n: spec.analyse(n).edges):
        with pytest.raises(AttnSpecError, match="no value"):
            ask(5)

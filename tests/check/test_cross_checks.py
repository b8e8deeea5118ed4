"""Claims about two sequences, their differences, and what verification finds of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.graphs.across import Across
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError
from attnspec.verification import verify, verify_each


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ cross {body} }}")


def said(body: str) -> list[str]:
    return [f"{d.code} {d.message}" for d in spec_of(body).check()]


# --- claims ---------------------------------------------------------------------------------------


def test_claims_hold_where_both_are_as_long() -> None:
    band = "attend where(abs(q * n - k * m) <= 2 * m)"
    for claim in (
        "rows_nonempty",
        "degree <= 5",
        "edges <= 5 * m",
        "order <= n",
        "self subset full",
    ):
        assert said(f"{band} require {claim}") == []
    (wrong,) = said(f"{band} require degree <= 4")
    assert wrong == (
        "A606 `degree <= 4` does not hold at n = 64: degree is 5, must be <= 4; for example query 2"
        " reads 0..4"
    )
    (wrong,) = said("attend window(radius = 2) require edges <= m at n = 4")
    assert wrong.startswith("A606 `edges <= m` does not hold at n = 4: edges are 14, must be <= 4")


def test_stable_speaks_of_queries_that_grow() -> None:
    assert said("attend window(radius = 3) | columns(last(2)) require stable") == []
    assert spec_of("attend full require stable").verdicts[0].status == "proven"


def changed(body: str) -> tuple[int, ...]:
    """The numbers in the counterexample to `stable`."""
    (found,) = (d for d in spec_of(f"{body} require stable").check() if d.code == "A606")
    words = found.message.replace(",", "").split()
    return tuple(int(word) for word in words if word.isdigit())


@pytest.mark.parametrize(
    "body",
    [
        "attend where(q * n <= k * m)",
        "attend rows(last(2))",
        "attend shift(window(radius = 2), by = -1)",
        "heads 2 attend full head 1 { attend window(radius = m // 4) }",
    ],
)
def test_a_counterexample_to_stable_is_a_pair_that_changes(body: str) -> None:
    query, key, n, reads, not_reads = changed(body)
    spec = spec_of(body)
    heads = range(spec.heads or 1)
    found = [
        (spec.mask(n, m=reads, head=h)[query, key], spec.mask(n, m=not_reads, head=h)[query, key])
        for h in heads
    ]
    assert (True, False) in found


def test_what_reads_m_and_changes_nothing_is_not_called_stable() -> None:
    (found,) = spec_of("attend where(m > 0 or q == k) require stable").check()
    assert found.message.endswith("a graph reads m, the number of queries")


# --- differences ----------------------------------------------------------------------------------


def test_differences_are_those_of_the_masks() -> None:
    a = spec_of("attend where(abs(q * n - k * m) <= 4 * m) | columns(first(2))")
    b = spec_of("attend where(abs(q * n - k * m) <= 3 * m)")
    for m, n in ((9, 20), (20, 9), (1, 1)):
        found = attnspec.diff(a, b, n, m=m)
        first, second = a.mask(n, m=m), b.mask(n, m=m)
        assert found.only_in_a.count == (first & ~second).sum()
        assert found.only_in_b.count == (second & ~first).sum()
        assert all(first[pair] and not second[pair] for pair in found.only_in_a.examples)
        assert f"m = {m}, n = {n}" in str(found)
        assert (found.to_dict()["m"], found.to_dict()["n"]) == (m, n)
    assert attnspec.diff(a, b, 5, m=0).equal
    assert attnspec.diff(a, a, 20, m=9).proven


def test_equal_where_both_are_as_long_is_no_proof() -> None:
    a, b = spec_of("attend where(q < m - 2)"), spec_of("attend where(q < n - 2)")
    found = attnspec.diff(a, b, 16)
    assert found.equal
    assert not found.proven
    assert not attnspec.diff(a, b, 16, m=9).equal
    (one,) = attnspec.diff(
        spec_of("attend self"), spec_of("attend window(radius = n // 100)"), 50
    ).compared
    assert one.differ_at == 257


def test_two_sequences_and_one_have_no_pairs_in_common() -> None:
    with pytest.raises(AttnSpecError, match="have no pairs in common"):
        attnspec.diff(spec_of("attend full"), parse("attention b { attend full }"), 5)


# --- verification ---------------------------------------------------------------------------------

EVERY = ("auto", "torch", "dense", "tiles", "bands", "scattered", "rows", "lists", "factored")


@pytest.mark.parametrize(("m", "n"), [(9, 20), (40, 17)])
def test_every_backend_is_held_against_the_definition(m: int, n: int) -> None:
    spec = spec_of("attend where(abs(q * n - k * m) <= 2 * m) | columns(first(2))")
    found = verify_each(spec.program, n, EVERY, m)
    assert found.ok, str(found)
    assert found.exhaustive
    assert (found.m, found.n) == (m, n)
    assert str(found).startswith(f"a, m = {m}, n = {n}: ")


@pytest.mark.parametrize(("m", "n"), [(9, 20), (20, 9)])
@pytest.mark.parametrize(
    "body",
    [
        "heads 3 input x: tokens attend columns(x) head 1 { attend favor(features = 16) }",
        "attend topk(keys = 4) | window(radius = 1)",
        "input x: choices(size = 4) attend chosen(x)",
        "attend full score softcap(cap = 20) normalize softmax1",
    ],
)
def test_all_kinds_of_specs_are_verified(body: str, m: int, n: int) -> None:
    found = verify(spec_of(body).program, n, m=m)
    assert found.ok, str(found)


@pytest.mark.parametrize(("m", "n"), [(9, 20), (20, 9)])
@pytest.mark.parametrize("backend", ["tiles", "bands", "scattered", "torch", "auto"])
def test_a_fault_is_found(backend: str, m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("attend where(abs(q * n - k * m) <= 2 * m)")
    module = spec.compile(backend=backend)
    whole = type(module).forward

    def moved(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        # one key too far
        return whole(self, q, k.roll(1, 2), v.roll(1, 2), **given)

    monkeypatch.setattr(type(module), "forward", moved)
    found = verify(spec.program, n, m=m, module=module)
    assert any("weighed once" in check.what for check in found.faults)


def test_a_layout_with_another_offset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("attend window(radius = 3)")
    module = spec.compile(backend="bands")
    before = Across.progressions

    def later(self: Across, q: np.ndarray, n: int) -> Any:
        return before(self, q + 1, n)

    monkeypatch.setattr(
        Across,
        "cover",
        lambda self, q, k, n: np.zeros(np.broadcast_shapes(q.start.shape, k.start.shape), np.uint8),
    )
    monkeypatch.setattr(Across, "progressions", later)
    found = verify(spec.program, 40, m=33, module=module)
    assert not found.ok
    assert any("queries are counted from 7 on" in str(check.fault) for check in found.faults)


def test_lints_say_that_they_look_at_as_many_queries_as_keys() -> None:
    (found,) = attnspec.parse("attention a { cross attend where(q >= 3 and k <= q) }").check()
    assert found.help == "`| columns(first(1))` gives every query the first key"
    assert "m = n" in found.notes[-1]
    spec = attnspec.parse("attention a { cross attend where(k < q) require degree <= 3 }")
    assert all("m = n" in each.notes[-1] for each in spec.check())

"""Two sequences: their differences, and what verification finds of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from population import spec_of

import attnspec
from attnspec import AttnSpecError, parse
from attnspec.cli import main

BAND = "attend where(abs(q * n - k * m) <= 2 * m)"


@pytest.mark.parametrize("body", ["attend where(q * n <= k * m)", "attend rows(last(2))"])
def test_a_counterexample_to_stable_is_a_pair_that_changes(body: str) -> None:
    (found,) = (d for d in spec_of(f"cross {body} require stable").check() if d.code == "A606")
    reads, n, query, key, not_reads, keys = map(int, re.findall(r"\d+", found.message))
    spec = spec_of(f"cross {body}")
    assert spec.mask(n, m=reads)[query, key]
    assert not spec.mask(keys, m=not_reads)[query, key]


def test_differences_are_those_of_the_masks() -> None:
    a = spec_of("cross attend where(abs(q * n - k * m) <= 4 * m) | columns(first(2))")
    b = spec_of("cross attend where(abs(q * n - k * m) <= 3 * m)")
    for m, n in ((9, 20), (20, 9), (1, 1), (0, 5)):
        found = attnspec.diff(a, b, n, m=m)
        first, second = a.mask(n, m=m), b.mask(n, m=m)
        assert found.only_in_a.count == (first & ~second).sum()
        assert found.only_in_b.count == (second & ~first).sum()
        assert all(first[pair] and not second[pair] for pair in found.only_in_a.examples)
        assert (found.to_dict()["m"], found.to_dict()["n"]) == (m, n)
    assert attnspec.diff(a, a, 20, m=9).proven
    a, b = spec_of("cross attend where(q < m - 2)"), spec_of("cross attend where(q < n - 2)")
    assert attnspec.diff(a, b, 16).equal
    assert not attnspec.diff(a, b, 16, m=9).equal
    with pytest.raises(AttnSpecError):
        attnspec.diff(a, parse("attention b { attend full }"), 5)


def verified(body: str, m: int, n: int, backend: str = "auto") -> dict[str, Any]:
    """What `attnspec verify` says of a spec of two sequences."""
    arguments = ["verify", "-", "-m", str(m), "-n", str(n), "--backend", backend, "--json"]
    done = CliRunner().invoke(main, arguments, input=f"attention a {{ cross {body} }}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(("m", "n"), [(9, 20), (40, 17)])
def test_every_backend_is_held_against_the_definition(m: int, n: int) -> None:
    answer = verified(f"{BAND} | columns(first(2))", m, n, "all")
    assert answer["ok"]
    assert (answer["exhaustive"], answer["m"], answer["n"]) == (True, m, n)


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
    assert verified(body, m, n)["ok"]

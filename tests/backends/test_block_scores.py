"""Scores of key blocks are those of plain loops over what each row sees, by every rule."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnspec.backends.decided.block_scores import Scores
from attnspec.backends.decided.given import Given
from attnspec.backends.decided.rows import Rows

SCALES = (0.5, 1.0, 2.0, 0.7)


def given_of(n_q: int, n_k: int, padded: bool) -> Given:
    """Four heads, of which two share keys each; with padding before, between and behind keys."""
    source = torch.Generator().manual_seed(10 * n_q + n_k)
    q, k = (torch.randn(3, heads, n, 5, generator=source) for heads, n in ((4, n_q), (2, n_k)))
    padding = None
    if padded:
        padding = torch.rand(3, n_k, generator=source) < 0.6
        padding[0, : n_k // 2] = False
        padding[1] = False
    return Given(q, k, (0, 1, 2, 3), (0, 0, 1, 1), SCALES, padding)


def score(rule: str, q: torch.Tensor, keys: torch.Tensor, scale: float, every: float) -> float:
    """What a block is worth to a row of the query q [d] that sees the keys [m, d] of it, where
    `every` is the sum of exponentials over all that the row sees."""
    dots = [float(q @ k) for k in keys]
    match rule:
        case "mean":
            return sum(dots) / len(dots)
        case "bound":
            return sum(max(float(x * k) for k in keys[:, c]) for c, x in enumerate(q))
        case "mass":
            return sum(float(torch.tensor(scale * x).exp()) for x in dots) / every
        case _:
            return max(dots)


def check(given: Given, rule: str, queries: int, size: int, causal: bool) -> int:
    """Compares the scores of all blocks of which a row sees anything; returns how many."""
    rows, scales, compared = Rows.of(given, queries, size), torch.tensor(SCALES)[:, None, None], 0
    # what every row sees whole blocks of is found once; the same by what each row sees
    for exact in (True,) if causal or rule in ("mass", "max") or size == 1 else (False, True):
        scores = Scores.of(rows, rule, exact)
        assert bool(scores.pooled) == (not exact)
        for part in rows.parts(2):
            seen = rows.visible(part, causal)
            found = scores(part, seen if exact else None, scales)
            assert found.shape == (3, 4, part.first.shape[1], rows.blocks)
            for sample, head, row in product(*map(range, found.shape[:3])):
                own = part.q_at[sample, row][part.own[sample, row]].tolist()
                first = int(given.first[sample])
                for block in range(rows.blocks) if own else ():
                    keys = [
                        [
                            j
                            for j in range(first + b * size, min(first + (b + 1) * size, given.n_k))
                            if given.real[sample, j] and (not causal or j <= own[0])
                        ]
                        for b in range(rows.blocks)
                    ]
                    if not keys[block]:
                        continue
                    q = torch.stack([given.q[sample, head, i - given.first_query] for i in own])
                    k, mean = given.k[sample, head // 2], q.double().mean(0)
                    every = (
                        (SCALES[head] * (k[[*chain.from_iterable(keys)]].double() @ mean))
                        .exp()
                        .sum()
                    )
                    meant = score(rule, mean, k[keys[block]].double(), SCALES[head], float(every))
                    assert float(found[sample, head, row, block]) == pytest.approx(meant, abs=1e-5)
                    compared += 1
    return compared


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_so_many_numbers_of_a_row_are_looked_at_together() -> None:
    given = given_of(60, 60, padded=False)
    rows, scales = Rows.of(given, 4, 2), torch.tensor(SCALES)[:, None, None]
    for rule, exact in product(("mean", "max", "bound", "mass"), (False, True)):
        scores = Scores.of(rows, rule, exact)
        (part,) = rows.parts(99)
        seen = None if scores.pooled else rows.visible(part, causal=False)
        with Largest() as largest:  # type: ignore[no-untyped-call]
            scores(part, seen, scales)
        # of each head, or of one after the other
        each = 3 * part.first.shape[1] * scores.width
        assert each <= largest.numbers <= 4 * each, (rule, exact)


def test_by_every_rule() -> None:
    compared = 0
    for rule, size in (("dot", 1), ("mean", 3), ("max", 3), ("bound", 3), ("mass", 3)):
        for causal, padded in product((False, True), repeat=2):
            for n_q, n_k, queries in ((1, 1, 1), (7, 7, 2), (2, 5, 3)):
                compared += check(given_of(n_q, n_k, padded), rule, queries, size, causal)
    assert compared > 1000

"""What kernels compute at once: no more numbers than they may, and by torch's own attention where
nothing is differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_checks import GRAPHS, spec_of, tensors
from torch.nn import functional

from attnspec.backends.common.score_formula import Formula
from attnspec.backends.scattered.backend import ScatteredBackend
from attnspec.backends.tiles.backend import TilesBackend
from attnspec.backends.tiles.kernel import TiledKernel
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

CPU = torch.device("cpu")


@contextmanager
def noted() -> Iterator[list[tuple[int, int, int]]]:
    """Of each use of the formula meanwhile: its blocks and the rows of one, and the numbers of its
    largest temporary."""
    found: list[tuple[int, int, int]] = []
    partial = Formula.partial

    def run(self: Formula, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        scores = q.shape[:5].numel() * k.shape[3]
        found.append((q.shape[3], q.shape[4], max(k.numel(), v.numel(), scores)))
        return partial(self, q, k, v, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Formula, "partial", run)
        yield found


@pytest.mark.parametrize("sizes", [(1, 1, 1, 3), (3, 2, 2, 4), (2, 4, 1, 9)])
@pytest.mark.parametrize("name", ["window", "random", "blocks", "full"])
@pytest.mark.limits("tiny")
def test_temporaries_are_of_one_block_or_small(name: str, sizes: tuple[int, int, int, int]) -> None:
    batch, key_heads, repeat, size = sizes
    n, heads = 70, key_heads * repeat
    work = Work(spec_of(GRAPHS[name]).relation(n), n, n)
    q, k, v = (x.detach() for x in tensors(batch, heads, n, n, key_heads=key_heads, size=size))
    rows = q.view(batch, key_heads, repeat, n, size)
    for backend in (TilesBackend(), ScatteredBackend()):
        kernel = backend.build(work, tuple(range(heads)), CPU)
        with noted() as found:
            if isinstance(kernel, TiledKernel):
                kernel.composed(rows, k, v, Call())
            else:
                kernel.gathered(rows, k, v, Call())  # type: ignore[attr-defined]
        assert found
        for blocks, tall, numbers in found:
            # a row of scores is whole, and the keys of a block are read at once
            one = batch * key_heads * n * max(size, repeat)
            assert numbers <= LIMITS.piece or (blocks == 1 and (tall == 1 or numbers <= one)), (
                backend.name
            )
        # nor are they far smaller than they may be
        whole = max(batch * key_heads * n * n * max(repeat, size), 1)
        assert len(found) <= 4 * whole // LIMITS.piece + 12


@pytest.mark.parametrize("graded", [False, True])
def test_what_is_not_differentiated_is_torch_s_attention(
    graded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    attend = functional.scaled_dot_product_attention

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(given)
        return attend(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    work = Work(spec_of(GRAPHS["window"]).relation(40), 40, 40)
    kernel = TilesBackend().build(work, (0, 1), CPU)
    given = tensors(1, 2, 40, 40)
    with torch.set_grad_enabled(graded):
        found = kernel(*given, Call())
    # where derivatives are asked for they may be asked for twice, which it has none of
    assert bool(calls) == (not graded)
    calls.clear()
    q, k, v = (x.detach() for x in given)
    plain = kernel(q, k, v, Call())
    assert calls
    torch.testing.assert_close(found.detach(), plain)

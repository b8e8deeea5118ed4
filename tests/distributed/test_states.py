"""Sums over the keys of parts of a sequence, merged, are those of the whole: values, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.backends.factored.kernels import kernel_of
from attnspec.distributed import partitions
from attnspec.distributed.partitions import Partition
from attnspec.distributed.planning import ALL, HEADS, ROWS, STATES, Tensors, plan
from attnspec.distributed.states import merged, passed_on
from attnspec.lower.lower import Binder
from attnspec.lower.work import Call, mechanism_of

SPECS = (
    "linear(feature = elu1)",
    "linear(feature = exp)",
    "linear(feature = relu, normalize = none)",
    "taylor(order = 1)",
    "taylor(order = 2)",
    "favor(features = 7)",
    "favor(features = 7, kind = hyperbolic)",
    "rbf(features = 7)",
    "rfa(features = 12)",
    "rfa(features = 12, gated = true)",
)

CUTS = (0, 0, 1, 30, 34, 61, 61)
"""Where parts of a sequence begin and end: two of them have no position."""


def kernel(text: str, heads: int, block: int) -> tuple[Any, Any]:
    program = attnspec.parse(text).program
    ((work, members),) = Binder(program, {}).works(0, heads, CUTS[-1], CUTS[-1])
    found: Any = kernel_of(work, members, torch.device("cpu"))
    return work, replace(found, how=replace(found.how, block=block, chunk=8))


def in_parts(kernel: Any, whole: Sequence[torch.Tensor], call: Call) -> Iterator[torch.Tensor]:
    """The outputs of each part on top of the sums that it goes on from."""
    parts = [
        (*(x[:, :, a:b] for x in whole), replace(call, padding=call.padding[:, a:b]))  # type: ignore[index]
        for a, b in pairwise(CUTS)
        if a < b
    ]
    at = [torch.arange(a, b) for a, b in pairwise(CUTS) if a < b]
    found = [kernel.key_sums(*part, where) for part, where in zip(parts, at, strict=True)]
    sums = [state for state, _ in found]
    shape = sums[0].total.shape
    lines = torch.stack([each.total.flatten(0, 1) for each in sums])
    framed = sums[0].base is not None
    bases = torch.stack([each.base if framed else lines.new_zeros(shape[0]) for each in sums])
    row = torch.arange(lines.shape[1]) // shape[1]
    left = [each for _, each in found if each is not None]
    if left:
        ready = [(total, bases[0]) for total in passed_on(lines, torch.stack(left), row)]
    else:
        ready = merged(lines, bases, row, kernel.how.causal)
    for part, own, (total, top) in zip(parts, sums, ready, strict=True):
        before = replace(own, sums=total.view(shape), base=top if framed else None)
        yield kernel.onward(*part, before)


EVERYTHING, SOME, FEW = (4, 2, 1 << 20), (3, 3, 256), (4, 1, 64)
"""Heads, key heads and the numbers of a block: all keys at once, some, a single one."""


def shapes_of(number: int, causal: bool) -> list[tuple[int, int, int]]:
    """Those that a mechanism is tried with: blocks are a loop around each of them alike."""
    some = [SOME] if number % 2 == causal else []
    return [EVERYTHING, *some, *([FEW] if number % 6 == 3 * causal else [])]


@pytest.mark.parametrize(
    ("text", "causal", "shapes"),
    [
        (text, causal, shapes_of(number, bool(causal)))
        for number, text in enumerate(SPECS)
        for causal in ("", "causal ")
        if causal or "gated" not in text
    ],
)
def test_sums_of_parts_are_those_of_the_whole(
    text: str, causal: str, shapes: Sequence[tuple[int, int, int]]
) -> None:
    draw = torch.Generator().manual_seed(3)
    for heads, key_heads, block in shapes:
        work, found = kernel(f"attention a {{ {causal}attend {text} }}", heads, block)
        many = (heads, key_heads, key_heads)
        parts = [
            torch.randn(2, h, CUTS[-1], 6, generator=draw, dtype=torch.float64).requires_grad_()
            for h in many
        ]
        # larger numbers, so that frames differ from part to part
        parts[1] = (parts[1].detach() * torch.linspace(0.1, 6, CUTS[-1])[:, None]).requires_grad_()
        spread = {
            part.name: torch.rand(
                heads, *(6 for _ in part.shape), generator=draw, dtype=torch.float64
            ).requires_grad_()
            for part in mechanism_of(work).parts()
        }
        padding = torch.rand(2, CUTS[-1], generator=draw) > 0.3
        # a part without a key, in the middle and in the beginning
        padding[0, 30:34], padding[1, :1] = False, False
        call = Call(padding=padding, tables=spread)
        wanted, got = found(*parts, call), torch.cat([*in_parts(found, parts, call)], 2)
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-12)
        upper = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
        leaves = [*parts, *spread.values()]
        pairs = [torch.autograd.grad(x, leaves, upper) for x in (got, wanted)]
        for one, other in zip(*pairs, strict=True):
            assert float((one - other).abs().max()) <= 1e-11 * (1 + float(other.abs().max()))


def weights(kernel: Any, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """The weights of all pairs [N, n, n] as sums of products of features, and of their absolute
    values, in numbers of 64 bits more."""
    maps = kernel.how.map
    sides = maps.queries(given.q.flatten(2, 3), given.tables), maps.keys(given.k, given.tables)
    f, g = (
        (each.values * torch.exp(each.log)[..., None]).flatten(0, 1).numpy().astype(np.longdouble)
        for each in sides
    )
    held = np.tri(CUTS[-1], dtype=bool) if kernel.how.causal else True
    return np.where(held, f @ g.mT, 0), np.where(held, abs(f) @ abs(g).mT, 0)


@pytest.mark.parametrize("causal", ["", "causal "])
def test_sums_that_cancel_are_as_exact_in_parts_as_in_one(causal: str) -> None:
    # N / D with D = sum_j f_i . g_j: rounding moves N and D by about u sum_j |f_i| . |g_j|, in
    # whatever order they are added, and so N / D by that share of |D|
    _, found = kernel(f"attention a {{ {causal}attend favor(features = 7, kind = trig) }}", 2, 256)
    worst, unit = 0.0, 2.0**-53
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        shape = 1, 2, CUTS[-1], 6
        parts = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)]
        call = Call(padding=torch.ones(1, CUTS[-1], dtype=torch.bool))
        wanted, got = found(*parts, call), torch.cat([*in_parts(found, parts, call)], 2)
        signed, absolute = weights(found, found.given(*parts, call))
        v = parts[2][0].numpy()
        exact = (signed @ v) / signed.sum(-1, keepdims=True)
        worse = absolute.sum(-1) / abs(signed.sum(-1))
        size = abs(v).max() + abs(exact).max(-1)
        for one in (wanted, got):
            apart = abs(one[0].numpy() - exact).max(-1)
            assert (apart <= 16 * unit * worse * size).all()
        worst = max(worst, float((wanted - got).abs().max() / (1 + wanted.abs().max())))
    # a thousand times more than of sums that do not cancel
    assert worst > 2e-13


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("size", [1, 6, 17])
def test_sums_have_the_size_that_is_planned(text: str, size: int) -> None:
    causal = "causal " if "gated" in text else ""
    work, found = kernel(f"attention a {{ {causal}attend {text} }}", 2, 1 << 20)
    kept = mechanism_of(work).key_sums(size)
    assert kept is not None
    x = torch.ones(1, 2, 5, size)
    tables = {
        part.name: torch.ones(2, *(size for _ in part.shape)) for part in mechanism_of(work).parts()
    }
    sums = found.key_sums(
        x, x[:, :1], torch.ones(1, 1, 5, 3), Call(tables=tables), torch.arange(5)
    )[0].total
    assert sums.shape == (2 if kept.by_head else 1, kept.features, 3 + kept.divides)
    assert sums.dtype == torch.float32


def how(text: str, n: int, ranks: int, partition: Partition | None = None) -> Any:
    tensors = Tensors(1, 32, 8, 128, 128, 2)
    return plan(attnspec.parse(text).program, n, ranks, tensors, partition=partition).layers[0]


def test_sums_travel_where_positions_would_be_more() -> None:
    linear = "attention a { causal attend linear() }"
    long = how(linear, 1 << 20, 64)
    assert long.how == STATES
    assert "bytes would reach a rank as heads" in long.why
    # 8 key heads of 128 x 129 float32 numbers, 63 of 64 parts of them there and back, and frames
    assert long.received.max() == 8 * 128 * 129 * 4 * 63 // 64 * 2 + 63 * 8 * 4
    assert how(linear, 1 << 20, 8).received.max() < 2 * 8 * 128 * 129 * 4
    assert how(linear, 64, 8).how == HEADS
    assert "bytes would reach a rank as states" in how(linear, 64, 8).why


@pytest.mark.parametrize(
    "text",
    [
        "input t: tokens attend columns(t) + linear()",
        "attend linformer(rank = 4, max_length = 65536, projection = conv)",
        "attend efficient()",
    ],
)
def test_what_has_no_sums_to_merge_goes_by_heads(text: str) -> None:
    assert how(f"attention a {{ {text} }}", 1 << 16, 8).how == HEADS


def test_causal_sums_go_by_the_order_of_positions() -> None:
    n = 1 << 16
    for build, expected in (
        (partitions.contiguous, STATES),
        (partitions.head_tail, HEADS),
        (lambda n, ranks: partitions.by_residue(n, ranks, ranks), HEADS),
    ):
        where = build(n, 8)
        assert how("attention a { causal attend linear() }", n, 8, where).how == expected
        assert how("attention a { attend linear() }", n, 8, where).how == STATES


def test_graphs_and_formulas_in_one_layer_go_by_heads() -> None:
    heads = "head 0..3 {{ attend window(radius = 9) }} head 4..31 {{ attend {} }}"
    for body in (
        "causal attend window(before = 1023, after = 0) + linear()",
        f"heads 32 {heads.format('linear()')}",
        f"heads 32 {heads.format('efficient()')}",
    ):
        assert how(f"attention a {{ {body} }}", 1 << 20, 8).how == HEADS


EACH_WAY = {
    ROWS: "attend window(radius = 9) | global(first(2))",
    STATES: "attend linear()",
    HEADS: "attend efficient()",
    ALL: "attend topk(keys = 5, share = all)",
}


@pytest.mark.parametrize("way", EACH_WAY)
def test_samples_and_numbers_of_more_bytes_are_as_many_bytes_more(way: str) -> None:
    program, n, ranks = attnspec.parse(f"attention a {{ {EACH_WAY[way]} }}").program, 1 << 14, 4
    where = partitions.contiguous(n, ranks)

    def links(batch: int, size: int) -> np.ndarray:
        tensors = Tensors(batch, 8, 8, 16, 16, size)
        (found,) = plan(program, n, ranks, tensors, partition=where).layers
        assert found.how == way
        return np.stack([found.there, found.back])

    one = links(1, 4)
    assert one[0].sum() > 0
    assert not np.diagonal(one, axis1=1, axis2=2).any()
    assert (links(3, 4) == 3 * one).all()
    assert (links(1, 8) == 2 * one).all()

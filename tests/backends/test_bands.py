"""Bands in orders: the steps of any composition are disjoint, their union is the relation, and
running them gives the dense result, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from attention_checks import ALONG
from random_specs import spec_text
from relation_checks import times_held
from sweeps import checkered

import attnspec
from attnspec.backends.bands.attention import SteppedAttention, _samples
from attnspec.backends.bands.views import _step
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.layout.axes import axis
from attnspec.layout.orders import Order, orders_of, terms_of, without
from attnspec.layout.steps import bands_of, layouts_of
from attnspec.layout.tile_layout import StepLayout, step_layout
from attnspec.layout.tiling import TooFine, classify
from attnspec.spec import Spec

ATTENTION = "attention a {{ attend {} }}"
GRAPHS = (
    "strided(stride = 7)",
    "causal & strided(stride = 16)",
    "fixed(stride = 16, cells = 3)",
    "window(radius = 20) | global(every(9))",
    "dilated(radius = 40, step = 5) | columns(first(3))",
    "powers(base = 2) & causal",
    "residue(step = 6) & residue(step = 4)",
    "causal & (window(radius = 30) | residue(step = 12) | summary(stride = 8, cells = 2))",
    "causal & (window(radius = 4) | global(positions(2, 5, 40, 41, 99)))",
    "window(radius = 30) - residue(step = 3)",
    "where((q * 7 + k * 3) % 11 == 0)",
    "residue(step = 3) | residue(step = 5) | residue(step = 7) | residue(step = 11) | self",
)


def steps_by_hand(relation: Relation, n_q: int, n: int, sizes: tuple[int, int]) -> list[StepLayout]:
    """Every term in its last order, whatever it costs."""
    found: list[StepLayout] = []
    earlier: tuple[Relation, ...] = ()
    for term in terms_of(relation):
        rest = without(term, earlier)
        earlier = (*earlier, term)
        tiles = classify(rest, n_q, n, orders_of(term, n)[-1], sizes)
        found.append(step_layout(tiles, rest, n))
    return found


def meaning(relation: Relation, n_q: int, n: int) -> np.ndarray:
    position = np.arange(n)
    held = evaluate_pairs(relation, position[:, None], position[None], n).astype(int)
    held[: n - n_q] = 0
    return held


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 101, 130])
def test_steps_in_any_order_hold_each_pair_once(graph: str, n: int) -> None:
    relation = attnspec.parse(ATTENTION.format(graph)).relation(n)
    for n_q in {n, (n + 1) // 2}:
        for sizes in ((16, 8), (32, 32)):
            held = times_held(steps_by_hand(relation, n_q, n, sizes), n)
            assert (held == meaning(relation, n_q, n)).all()


def relations(spec: Spec, n: int) -> Iterator[Relation]:
    for _, _, relation in spec.stack().relations(n):
        yield relation


def check_specs(seeds: range, n: int) -> None:
    for seed in seeds:
        text = spec_text(seed)
        for relation in relations(attnspec.parse(text), n):
            held = times_held(layouts_of(bands_of(relation, n, n), n, n), n)
            assert (held == meaning(relation, n, n)).all(), f"seed {seed}: {text}"


@pytest.mark.parametrize("part", range(4))
def test_random_compositions_hold_each_pair_once(part: int) -> None:
    check_specs(range(part * 100, part * 100 + 20), (33, 64, 97, 130)[part])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_compositions(part: int) -> None:
    check_specs(range(1000 + part * 100, 1100 + part * 100), 40 + 13 * part)


def test_a_step_that_covers_a_pair_again_is_noticed() -> None:
    relation = attnspec.parse(ATTENTION.format("strided(stride = 8)")).relation(40)
    first, second = terms_of(relation)
    twice = [
        step_layout(classify(term, 40, 40, orders_of(term, 40)[-1], (8, 8)), term, 40)
        for term in (first, second)
    ]
    assert not (times_held(twice, 40) == meaning(relation, 40, 40)).all()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)[:, :, None] * 0.3).masked_fill(~mask, -1e300)
    return scores.softmax(-1).masked_fill(~mask, 0.0) @ v[:, :, None]


@pytest.mark.parametrize(
    ("graph", "padded", "kind"),
    checkered(GRAPHS[:10], [False, True], [torch.float64, torch.float32, torch.bfloat16]),
)
def test_values_and_gradients(graph: str, padded: bool, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = attnspec.parse(ATTENTION.format(graph))
    bound = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}[kind]
    for n, n_q in ((1, 1), (64, 64), (101, 40)):
        q, grad = (torch.randn(2, 2, 2, n_q, 8, dtype=kind) for _ in range(2))
        k, v = (torch.randn(2, 2, n, 8, dtype=kind) for _ in range(2))
        padding = torch.rand(2, n) > 0.3 if padded else None
        mask = torch.from_numpy(spec.mask(n)[n - n_q :])[None, None, None]
        if padding is not None:
            # a sample without any key
            padding[1] = False
            mask = mask & padding[:, None, None, None]
        attention = SteppedAttention(steps_by_hand(spec.relation(n), n_q, n, (16, 16)))
        out, lse = attention.forward(q, k, v, padding, 0.3)
        found = [out, *attention.backward(grad, (q, k, v, out, lse), padding, 0.3)]
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        meant = dense(exact[0], exact[1], exact[2], mask)
        meant.backward(grad.double())  # type: ignore[no-untyped-call]
        wanted = [meant, *(x.grad for x in exact)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert theirs is not None
            error = (ours.double() - theirs).abs().max()
            assert error <= bound * (1 + theirs.abs().max())


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_gradients(count: int) -> None:
    torch.manual_seed(0)
    module = attnspec.parse(ATTENTION.format("strided(stride = 3)")).compile(backend="bands")
    tensors = [
        torch.randn(1, heads, 9, 2, dtype=torch.float64, requires_grad=True)
        for heads in (2, count, count)
    ]
    assert torch.autograd.gradcheck(module, tensors, **ALONG)
    assert torch.autograd.gradgradcheck(module, tensors, **ALONG)


INPUTS = (
    ("causal input x: ids attend same(x)", "ids"),
    ("input x: tokens attend window(radius = 5) | global(x)", "tokens"),
    ("input x: length attend causal | prefix(x)", "length"),
    ("input x: ids attend same(x) & (residue(step = 4) | self)", "ids"),
)


@pytest.mark.parametrize(("body", "kind"), INPUTS)
def test_run_time_inputs(body: str, kind: str) -> None:
    torch.manual_seed(0)
    spec = attnspec.parse(f"attention a {{ {body} }}")
    for n in (1, 7, 130, 300):
        x = {
            "ids": torch.randint(0, 4, (2, n)).sort(-1).values,
            "tokens": torch.rand(2, n) < 0.1,
            "length": torch.randint(0, n + 1, (2,)),
        }[kind]
        results = []
        for backend in ("dense", "bands"):
            torch.manual_seed(n)
            tensors = [
                torch.randn(2, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
            ]
            out = spec.compile(backend=backend)(*tensors, inputs={"x": x})
            out.square().sum().backward()
            results.append([out.detach(), *(t.grad for t in tensors)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_residues_of_unequal_classes() -> None:
    side = axis(3, 20, 5, 2)
    positions = side.positions[side.positions >= 0]
    assert sorted(positions.tolist()) == list(range(3, 20))
    assert len({p % 5 for p in side.tiles.start.tolist()}) == 5


@pytest.mark.parametrize("apart", [False, True])
def test_samples_with_the_same_real_keys_follow_one_another(apart: bool) -> None:
    paddings: list[torch.Tensor | None] = [None]
    for batch in range(1, 5):
        paddings += [torch.tensor(x) for x in product(([1, 1], [1, 0], [0, 1]), repeat=batch)]
    for padding in paddings:
        padding = None if padding is None else padding.bool()
        batch = 3 if padding is None else len(padding)
        parts = list(_samples(batch, padding, apart))
        covered = [list(range(batch)[samples]) for samples, _ in parts]
        assert [sample for some in covered for sample in some] == [*range(batch)]
        real = torch.ones(batch, 2, dtype=torch.bool) if padding is None else padding
        for some, (_, mine) in zip(covered, parts, strict=True):
            assert mine is None or not bool(real.all())
            assert all(torch.equal(real[x], real[0] if mine is None else mine) for x in some)
        # as few parts as may be, and none of no sample
        changes = int((real[1:] != real[:-1]).any(1).sum())
        assert len(parts) == (batch if apart else 1 + changes)


def test_too_many_pairs_of_tiles_are_refused() -> None:
    relation = attnspec.parse(ATTENTION.format("where((q * 7 + k * 3) % 11 == 0)")).relation(
        1 << 17
    )
    with pytest.raises(TooFine):
        classify(relation, 1 << 17, 1 << 17, Order(), (8, 8))


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ([[0, 3, 6], [1, 4, 7]], 3),
        ([[0, 3], [4, 7]], 3),
        ([[0, 3], [4, 6]], 0),
        ([[0, 3, 7]], 0),
        ([[2, 2, 2]], 0),
        ([[6, 3, 0]], 0),
        ([[5]], 1),
    ],
)
def test_the_step_of_rows_is_one_that_a_slice_may_have(rows: list[list[int]], step: int) -> None:
    assert _step(np.array(rows)) == step

"""Edge by edge: the layout against `holds`, every means against dense, derivatives, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import (
    ALONG,
    module_of,
    spec_of,
    tensors,
)

from attnspec.backends.scattered.backend import ScatteredBackend
from attnspec.backends.scattered.kernel import ScatteredKernel
from attnspec.backends.scattered.products import EdgeProducts, scores, to_queries
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.relation import Relation
from attnspec.layout.edge_count import edges_of
from attnspec.layout.edge_list import EdgeLayout, edge_layout
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

SCATTERED = {
    "random": "attend random(keys = 3, seed = 5)",
    "many keys": "attend random(keys = 20)",
    "causal random": "causal attend random(keys = 6)",
    "powers": "attend powers(base = 2)",
    "causal powers": "causal attend powers(base = 3)",
    "expander": "attend expander(degree = 6)",
    "skewed": "attend random(keys = 2) | global(first(3))",
    "where": "attend where(q == k + 1 or (q * k) % 31 == 5)",
    "empty rows": "attend where(k * 3 == q or k + 9 == q)",
    "ring": "attend where((q - k) % n <= 2) | where((k - q) % n <= 2) | random(keys = 2)",
    "tree": "causal attend self | prefix(5) | where(5 <= k and (q - 6) // 2 == k - 5)",
    "long rows": "causal attend window(radius = 20) | columns(first(9))",
    "long rows and all keys": "attend block(size = 16) | global(first(2) | last(1))",
    "nothing": "attend window(radius = 3) - full",
}
CPU = torch.device("cpu")


def relation_of(name: str, n: int) -> Relation:
    return spec_of(SCATTERED[name]).relation(n)


def kernel_of(work: Work, heads: int = 4) -> ScatteredKernel:
    kernel = ScatteredBackend().build(work, tuple(range(heads)), CPU)
    assert isinstance(kernel, ScatteredKernel)
    return kernel


def held_by(layout: EdgeLayout) -> np.ndarray:
    """How often places that are not padded hold each pair, int [n_q, n_k]."""
    held = np.zeros((layout.n_q, layout.n_k), int)
    for rows in layout.rows:
        places = layout.slice_of(rows)
        real = np.ones(places.stop - places.start, bool) if rows.held is None else rows.held.ravel()
        np.add.at(held, (layout.queries[places][real], layout.keys[places][real]), 1)
    return held


def test_what_a_row_does_not_read_cannot_reach_it() -> None:
    name, n = "causal powers", 70
    module = module_of(SCATTERED[name], "scattered")
    q, k, v = (x.detach().float() for x in tensors(1, 2, n, n))
    before = module(q, k, v)
    k[:, :, 0], v[:, :, 0] = torch.nan, torch.inf
    reads = torch.from_numpy(spec_of(SCATTERED[name]).mask(n)[:, 0])
    after = module(q, k, v)
    assert torch.equal(after[:, :, ~reads], before[:, :, ~reads])
    assert not torch.isfinite(after[:, :, reads]).any()
    # nor is anything left over for the next call
    k[:, :, 0], v[:, :, 0] = 0.0, 0.0
    assert torch.isfinite(module(q, k, v)).all()


@pytest.mark.parametrize("name", ["random", "causal powers", "empty rows"])
def test_derivatives_of_derivatives(name: str) -> None:
    module = module_of(SCATTERED[name], "scattered")
    given = tensors(1, 2, 5, 9, key_heads=1, size=2)
    assert torch.autograd.gradcheck(module, given, **ALONG)
    assert torch.autograd.gradgradcheck(module, given, **ALONG)


def test_the_three_products_differentiate_into_each_other() -> None:
    products = EdgeProducts(edge_layout(relation_of("causal powers", 9), 5, 9))
    a, b, _ = tensors(1, 2, 5, 9, key_heads=1, size=2)
    a = a.detach().view(1, 1, 2, 5, 2).requires_grad_()
    w = torch.randn(1, 1, 2, products.places, dtype=torch.float64, requires_grad=True)
    for product, given in ((scores, (a, b)), (to_queries, (w, b))):
        assert torch.autograd.gradcheck(lambda *x, f=product: f(*x, products), given, **ALONG)
        assert torch.autograd.gradgradcheck(lambda *x, f=product: f(*x, products), given, **ALONG)


# torch scripts the derivatives of its own operators when jvp is first used
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_of_torch_func() -> None:
    kernel = kernel_of(Work(relation_of("causal powers", 30), 30, 30), heads=2)
    q, k, v = (x.detach() for x in tensors(3, 2, 30, 30))

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel(q[None], k[None], v[None], Call())[0]

    torch.testing.assert_close(torch.func.vmap(one)(q, k, v), kernel(q, k, v, Call()))
    step = torch.randn_like(q)
    slope = torch.func.jvp(lambda x: kernel(x, k, v, Call()), (q,), (step,))[1]
    change = kernel(q + 1e-6 * step, k, v, Call()) - kernel(q - 1e-6 * step, k, v, Call())
    torch.testing.assert_close(slope, change / 2e-6, rtol=1e-5, atol=1e-7)


def test_dropout_drops_weights_of_edges_alike_in_both_directions() -> None:
    module = module_of("attend random(keys = 20)", "scattered")
    q, k, v = tensors(1, 2, 60, 60)
    torch.manual_seed(4)
    out = module(q, k, v, dropout_p=0.5)
    torch.manual_seed(4)
    assert torch.equal(module(q, k, v, dropout_p=0.5), out)
    assert not torch.allclose(module(q, k, v), out)
    # the output is linear in v, whatever was dropped
    (slope,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((slope * v).sum(), out.sum())


def test_refusals() -> None:
    backend = ScatteredBackend()
    reads = Work(Relation(), 8, 8, reads=("t",))
    assert "run-time input `t`" in (backend.refuses(reads, "cpu") or "")
    both = Work(Relation(), 8, 8, reads=("s", "t"))
    assert "run-time inputs `s`, `t`" in (backend.refuses(both, "cpu") or "")
    dense = spec_of("attend full").relation(1 << 12)
    assert "a query reads about 4,096" in (backend.refuses(Work(dense, 4096, 4096), "cpu") or "")
    many = spec_of("attend window(radius = 4096)").relation(1 << 16)
    assert f"{LIMITS.pairs_listed:,} edges" in (
        backend.refuses(Work(many, 1 << 16, 1 << 16), "cpu") or ""
    )
    few = Work(Random(32), 4096, 4096)
    assert backend.refuses(few, "cpu") is None
    assert backend.steps(few) == ("about 131,072 edges, 32.0 to a query",)


@pytest.mark.parametrize("name", SCATTERED)
def test_edges_are_estimated_closely(name: str) -> None:
    for n_q, n in ((1, 1), (300, 300), (40, 300)):
        relation = relation_of(name, n)
        exact = int(held_by(edge_layout(relation, n_q, n)).sum())
        # three rows of `skewed` read everything, and a sample does not see them
        missed = 3 * n if name == "skewed" else 0
        assert abs(edges_of(relation, n_q, n) - exact) <= 0.5 * exact + missed + n_q / 2


@pytest.mark.parametrize("change", ["", "score alibi()", "normalize softmax1"])
def test_log_sum_exps_of_gathered_rows(change: str) -> None:
    """What `vmap` runs, over rows of several lengths, some of them empty."""
    module = module_of(f"attend where(k * 3 < q) {change}", "scattered")
    q, k, v = (x.detach() for x in tensors(2, 2, 40, 40))
    many = torch.func.vmap(
        lambda *each: module(*(x[None] for x in each), return_lse=True), out_dims=1
    )(q, k, v)
    for one, other in zip(many, module(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(one[0], other)

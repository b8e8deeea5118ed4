"""Calls whose graphs the data decide, for kernels that are held against the dense definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnspec.backends.decided.deciders import decide
from attnspec.backends.decided.given import Given
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.lists.backend import ListsBackend
from attnspec.backends.lists.kernel import ListedKernel
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.chosen import Chosen
from attnspec.graphs.patterns.cluster import Cluster
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import StandIn
from attnspec.lower.work import Backend, Call, Work

CPU = torch.device("cpu")

LISTS = ListsBackend()


def assert_partials_agree(
    kernel: Any, work: Work, members: tuple[int, ...], given: Sequence[torch.Tensor], call: Call
) -> None:
    """The outputs, log-sum-exps and gradients, also of learned tables, of a kernel of these heads
    are those of the definition in its type."""
    leaves, results = [*given, *call.tables.values()], []
    both: tuple[Any, ...] = kernel, DenseKernel(work, members, CPU)
    for each in both:
        out, lse = each.partial(*given, call)
        sums = lse.masked_fill(lse == -torch.inf, 0.0)
        total = torch.cos(torch.arange(out.numel())).view(out.shape).mul(out).sum()
        results.append([out, sums, *torch.autograd.grad(total + sums.sin().sum(), leaves)])
    for ours, meant in zip(*results, strict=True):
        scale = max(1.0, meant.abs().max().item())
        torch.testing.assert_close(ours / scale, meant / scale, rtol=1e-4, atol=2e-5)


def a_call(
    work: Work, heads: int, shared: int, padding: torch.Tensor | None, data: dict[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Call]:
    """q, k and v of two samples, and a call with the choices that they make."""
    sizes = (2, heads, work.n_q, 8), (2, heads // shared, work.n_k, 8)
    # memory that does not follow its axes
    q, k, v = (
        torch.randn(b, n, h, d).double().transpose(1, 2)
        for b, h, n, d in (sizes[0], sizes[1], sizes[1])
    )
    if work.unit_keys:
        q = k[:, :, work.n_k - work.n_q :]
    scales = (0.35,) * heads
    given = Given(
        q,
        k,
        tuple(range(heads)),
        tuple(h // shared for h in range(heads)),
        scales,
        padding,
        data=data,
    )
    choices = {leaf: decide(leaf, given) for leaf in work.decided}
    names = {name: value for name, value in data.items()}
    return (q, k, v), Call(padding=padding, data={**names, **choices})


def agree(
    work: Work, heads: int, tensors: Sequence[torch.Tensor], call: Call, backend: Backend = LISTS
) -> None:
    """Values, log-sum-exps and all first derivatives are those of the definition."""
    assert backend.refuses(work, "cpu") is None
    members = tuple(range(heads))
    kernel = backend.build(work, members, CPU)
    assert isinstance(kernel, ListedKernel)
    found = []
    for one in (kernel, DenseKernel(work, members, CPU)):
        q, k, v = leaves = [x.detach().clone().requires_grad_() for x in tensors]
        tables = {name: x.detach().clone().requires_grad_() for name, x in call.tables.items()}
        mine = replace(call, tables=tables)
        out, lse = one.partial(q, k, v, mine)
        assert lse is not None
        torch.manual_seed(1)
        upper = torch.randn_like(out), torch.randn_like(lse)
        finite = lse > -torch.inf
        total = (out * upper[0]).sum() + (lse[finite] * upper[1][finite]).sum()
        asked = [*leaves, *tables.values()]
        grads = torch.autograd.grad(total, asked, materialize_grads=True)
        found.append((out, lse, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def chosen(
    n_q: int, n_k: int, size: int, count: int, heads: int
) -> tuple[Chosen, dict[str, torch.Tensor]]:
    """Lists that repeat blocks and name none, for so many heads; one row is empty."""
    blocks = -(-n_k // size)
    lists = torch.randint(-1, blocks, (2, heads, n_q, count))
    lists[0, 0, n_q // 2] = -1
    return Chosen(StandIn("sel", size)), {"sel": lists}


def of_compositions() -> dict[str, Relation]:
    """Graphs with decided ones in them."""
    one, two = Chosen(StandIn("sel", 16)), Chosen(StandIn("other", 8))
    return {
        "beside": Union((one, Window(5, 5))),
        "within": Intersection((one, Window(40, 40))),
        "of two": Union((one, two)),
        "both": Intersection((one, two)),
        "all": Union(
            (Intersection((one, Causal())), Intersection((two, Window(60, 0))), Window(2, 0))
        ),
        "spread": Intersection((Union((one, two, Window(3, 3))), Causal())),
    }


def sorted_graphs() -> dict[str, Relation]:
    """Graphs that sort positions."""
    return {
        "lsh": Lsh(buckets=6, rounds=3, chunk=8),
        "lsh, causal": Intersection((Causal(), Lsh(buckets=6, rounds=3, chunk=8, causal=True))),
        "lsh, in buckets": Lsh(buckets=6, rounds=2, chunk=8, cut="bucket"),
        "lsh, apart": Lsh(buckets=6, rounds=2, chunk=16, share_qk=False),
        "lsh, apart, in buckets": Lsh(buckets=4, rounds=2, chunk=8, share_qk=False, cut="bucket"),
        "lsh, multiplied": Lsh(buckets=4, rounds=4, chunk=16, multiplicity=True),
        "lsh, all buckets": Lsh(buckets=6, rounds=2, chunk=8, bucket_mask=False, look=2),
        "lsh, one bucket": Lsh(buckets=2, rounds=1, chunk=512, look=0, share_qk=False),
        "lsh, beside": Union((Lsh(buckets=6, rounds=2, chunk=8), Window(3, 3))),
        "clusters": Cluster(count=5),
        "clusters, within": Intersection((Cluster(count=3), Window(60, 0))),
        "clusters, beside": Union((Cluster(count=9), TopK(blocks=1, size=16, queries=1))),
    }

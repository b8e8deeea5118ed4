"""Parts of what ranks compute, in one process: those of the whole, at their share of its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnspec
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.planner import choose
from attnspec.distributed.planning import Tensors, plan
from attnspec.distributed.regions import Region
from attnspec.distributed.rows import GroupHere
from attnspec.lower.lower import Binder, bias_tables, stand_ins
from attnspec.lower.work import MERGED, Call, Softcap, Work
from attnspec.runtime.call_checks import check_inputs

CPU = torch.device("cpu")

N = 150

SPECS = (
    "causal attend full score alibi()",
    "attend window(radius = 9) | global(first(2)) score softcap(cap = 3) score alibi()",
    "heads 4 attend window(before = 20, after = 3) score bias(buckets = 8, max_distance = 16)",
    "heads 4 attend strided(stride = 7) score bias(buckets = 12, max_distance = 200)",
    "attend window(radius = 4) | columns(last(3)) normalize softmax1",
    "attend block(size = 16) normalize relu score alibi()",
    "attend window(radius = 5) normalize sigmoid",
    "input t: tokens attend columns(t) & causal | window(radius = 2)",
    "input ids: ids attend same(ids) score alibi()",
    "input ids: ids attend same(ids) & causal | self normalize relu",
)

PARTS = {
    "halo": (np.arange(50, 100), np.arange(43, 50)),
    "own": (np.arange(50, 100), np.arange(50, 100)),
    "globals": (np.r_[0:3], np.arange(50, 120)),
    "classes": (np.arange(1, N, 3), np.r_[np.arange(0, N, 3), np.arange(2, N, 3)]),
    "ends": (np.r_[0:19, 131:N], np.r_[0:19, 131:N]),
    "one": (np.array([77]), np.array([0, 77, 149])),
    "many": (np.r_[0:110], np.r_[0:100, 140:150]),
    "no key": (np.arange(5), np.arange(0)),
}


def work_of(text: str, n: int) -> tuple[Work, tuple[int, ...], attnspec.Spec]:
    spec = attnspec.parse(f"attention a {{ {text} }}")
    ((work, heads),) = Binder(spec.program, stand_ins(spec.program)).works(0, 4, n, n)
    return work, heads, spec


def call_of(spec: attnspec.Spec, work: Work, n: int, padding: bool) -> Call:
    draw = torch.Generator().manual_seed(1)
    x = torch.zeros(2, 4, n, 1)
    made: dict[str, torch.Tensor] = {
        "t": torch.rand(2, n, generator=draw) < 0.1,
        "ids": torch.sort(torch.randint(4, (2, n), generator=draw)).values,
    }
    given = {entry.name: made[entry.name] for entry in spec.program.inputs}
    data = check_inputs(spec.program, given or None, x, x, None)
    tables = {
        name: torch.randn(4, 12 if "12" in str(work.changes) else 8, generator=draw).double()
        for name in bias_tables(spec.program).values()
    }
    tables = {name: table.requires_grad_() for name, table in tables.items()}
    return Call(torch.rand(2, n, generator=draw) > 0.2 if padding else None, 0.0, tables, data)


@pytest.mark.parametrize("text", SPECS)
def test_a_part_is_that_of_the_definition(text: str) -> None:
    work, heads, spec = work_of(text, N)
    # the zero logit of `softmax1` is added where parts are merged
    plain = work.normalize == "softmax1"
    dense = DenseKernel(replace(work, normalize="softmax") if plain else work, heads, CPU)
    for number, (queries, keys) in enumerate(PARTS.values()):
        call = call_of(spec, work, N, number % 2 == 1)
        draw = torch.Generator().manual_seed(number)
        whole = [
            torch.randn(2, many, N, 5, generator=draw).double().requires_grad_()
            for many in (4, 2, 2)
        ]
        q, k, v = (
            x[:, :, torch.from_numpy(rows)]
            for x, rows in zip(whole, (queries, keys, keys), strict=True)
        )
        region = Region(work, heads, queries, keys, CPU)
        out, lse = region.partial(q, k, v, call)
        # the definition on all positions, of which only these keys are real
        real = torch.zeros(N, dtype=torch.bool)
        real[torch.from_numpy(keys)] = True
        padding = real if call.padding is None else call.padding & real
        given = Call(padding.expand(2, -1), 0.0, call.tables, call.data)
        wanted, sums = dense.partial(whole[0], whole[1], whole[2], given)
        rows = torch.from_numpy(queries)
        pairs = [(out, wanted[:, :, rows])]
        assert (lse is not None) == (work.normalize in MERGED)
        if lse is not None and sums is not None:
            wide = sums[:, :, rows]
            assert torch.equal(torch.isinf(lse), torch.isinf(wide))
            pairs.append((lse.nan_to_num(neginf=0.0), wide.nan_to_num(neginf=0.0)))
        upper = [torch.randn(one.shape, generator=draw).double() for one, _ in pairs]
        leaves = [*whole, *call.tables.values()]
        each = []
        for side in (0, 1):
            assert torch.allclose(pairs[0][0], pairs[0][1], rtol=1e-11, atol=1e-12)
            loss = sum(((pair[side] * up).sum() for pair, up in zip(pairs, upper, strict=True)))
            asked = isinstance(loss, torch.Tensor) and loss.requires_grad
            each.append(torch.autograd.grad(loss, leaves, allow_unused=True) if asked else None)  # type: ignore[arg-type]
        if each[0] is None:
            assert not len(keys)
            continue
        for one, other in zip(*each, strict=True):
            none = torch.zeros(())
            assert torch.allclose(
                none if one is None else one, none if other is None else other, atol=1e-11
            )


@pytest.mark.parametrize("text", SPECS)
def test_where_positions_stand_is_said_where_distances_do_not(text: str) -> None:
    work, heads, _ = work_of(text, N)
    draw = np.random.Generator(np.random.PCG64(0))
    some = [np.sort(draw.choice(N, 4, replace=False)) for _ in range(8)]
    parts = [*PARTS.values(), *pairwise(some)]
    parts += [(np.arange(9, 21), np.arange(low, low + 7)) for low in range(9, 21)]
    parts += [(np.arange(low, low + 3), np.arange(7)) for low in range(3, 10)]
    asks = any(not isinstance(change, Softcap) for change in work.changes)
    said = []
    for queries, keys in parts:
        region = Region(work, heads, queries, keys, CPU)
        if region.empty:
            continue
        laid = region.laid_out
        # how far each query is from each key, in the short sequence and in the long one
        short = laid.n_k - len(queries) + np.arange(len(queries))[:, None] - np.arange(len(keys))
        alike = (short == queries[:, None] - keys).all()
        said.append(laid.standing is not None)
        assert said[-1] == (asks and not alike)
        if laid.standing is not None:
            assert laid.standing.queries.tolist() == queries.tolist()
            assert laid.standing.keys[: len(keys)].tolist() == keys.tolist()
            assert len(laid.standing.keys) == laid.n_k
            assert laid.standing.length == N
    assert set(said) == ({True, False} if asks else {False})


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products of numbers in matrix products and in the flash kernel, its calls, and the
    numbers of the largest tensor that is made."""

    products, calls, largest = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            q, k = args[0], args[1]
            self.products += 2 * q.numel() * k.shape[-2]
            self.calls += 1
        elif name in ("mm", "bmm"):
            self.products += args[0].numel() * args[1].shape[-1]
            self.calls += 1
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        return found


def counted(run: Callable[[], object]) -> tuple[int, int, int]:
    mode = Counting()  # type: ignore[no-untyped-call]
    with mode, torch.no_grad():
        run()
    return mode.products, mode.calls, mode.largest


LONG = 2048
RANKS = 4


@pytest.mark.parametrize(
    ("graph", "factor"),
    [
        ("window(radius = 100)", 1.35),
        ("causal full", 1.1),
        ("window(radius = 60) | global(first(8))", 1.6),
        ("dilated(radius = 400, step = 4)", 1.6),
    ],
)
def test_a_rank_computes_its_share_of_the_edges(graph: str, factor: float) -> None:
    text = "causal attend full" if graph == "causal full" else f"attend {graph}"
    work, heads, spec = work_of(text, LONG)
    x = torch.randn(1, 4, LONG, 8)
    whole, calls, _ = counted(lambda: choose(work, "cpu").build(work, heads, CPU)(x, x, x, Call()))
    # one key head: rows, however many there are
    found = plan(spec.program, LONG, RANKS, Tensors(1, 4, 1, 8, 8, 4))
    (exchange,) = found.layers[0].exchanges
    each = []
    for rank in range(RANKS):
        here = GroupHere(exchange, 0, rank, 1, CPU, "auto")
        parts = [
            here.at_home,
            here.over_guests,
            *(region for _, region in here.for_guests.values()),
        ]

        def run(parts: list[Region] = parts) -> None:
            for region in parts:
                q, k = x[:, :, : len(region.queries)], x[:, :, : len(region.keys)]
                region.partial(q, k, k, Call())

        each.append(counted(run))
    products = [one for one, _, _ in each]
    edges = int(degrees_of(work.relation, LONG).sum()) * 4 * 2 * 8
    assert edges <= sum(products) <= 2.5 * edges
    assert max(products) <= factor * whole / RANKS, (products, whole)
    assert max(many for _, many, _ in each) <= calls + 8 * RANKS
    # never the scores of all pairs of a shard
    assert max(most for _, _, most in each) <= (LONG // RANKS) ** 2


@pytest.mark.parametrize(("name", "ran"), [("dense", "DenseKernel"), ("tiles", "TiledKernel")])
def test_a_backend_by_name_runs_the_parts_that_it_does_not_refuse(name: str, ran: str) -> None:
    work, heads, _ = work_of("attend window(radius = 9)", N)
    queries, keys = PARTS["many"]
    assert type(Region(work, heads, queries, keys, CPU, name).kernel).__name__ == ran
    chosen = Region(work, heads, queries, keys, CPU).kernel
    # rows takes the last few queries, and these are more
    assert type(Region(work, heads, queries, keys, CPU, "rows").kernel) is type(chosen)

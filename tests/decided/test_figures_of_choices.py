"""Figures before tensors are there, held against what tensors decide."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from zoo import EXAMPLES

from attnspec.cli.root import main
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.patterns.topk import TopK
from attnspec.lower.lower import stand_ins, works_of
from attnspec.spec import parse
from attnspec.text.diagnostics import SpecError

BODIES = (
    "causal attend topk(blocks = 3, size = 8, queries = 1)",
    "attend topk(keys = 7)",
    "causal attend topk(keys = 7, queries = 3) | window(radius = 2)",
    "attend topk(blocks = 2, size = 8, always = columns(first(20)))",
    "causal attend lsh(chunk = 8, rounds = 2)",
    "attend lsh(chunk = 8, rounds = 3, share_qk = false)",
    "attend cluster(count = 4)",
    "attend cluster(of = q, count = 4)",
    "causal attend sinkhorn(size = 8)",
    "attend sinkhorn(size = 8, cut = 2)",
)


@pytest.mark.parametrize(
    ("call", "keys"),
    [
        ("topk(keys = 3)", 3),
        ("topk(blocks = 2, size = 4)", 8),
        ("topk(blocks = 20, size = 4)", 64),
        ("lsh(rounds = 2, chunk = 4)", 16),
        ("cluster(count = 4)", 16),
        ("cluster(of = q, count = 4)", 4),
        ("sinkhorn(size = 4)", 8),
    ],
)
def test_estimates_go_by_the_keys_that_are_scored(call: str, keys: int) -> None:
    program = parse(f"attention a {{ attend {call} }}").program
    ((work, _),) = works_of(program, 0, 1, 64, 64, stand_ins(program))
    assert [each.about_keys(64) for each in work.decided] == [keys]


@pytest.mark.parametrize("body", BODIES)
def test_bounds_before_tensors_hold(body: str) -> None:
    spec, n = parse(f"attention a {{ {body} }}"), 93
    q = torch.randn(16, n, 32, generator=torch.Generator().manual_seed(0))
    before, after = spec.analyse(n), spec.analyse(n, tensors=(q, q))
    assert before.quality["edges"] == "bound"
    assert after.quality["edges"] == "exact"
    assert after.edges is not None
    assert before.edges is not None
    assert after.edges <= 16 * before.edges
    assert (after.degree or 0) <= (before.degree or 0)


SCORED = (
    "topk(keys = 3)",
    "topk(keys = 3, queries = 5)",
    "topk(blocks = 2, size = 5)",
    "topk(blocks = 2, size = 5, queries = 4)",
    "topk(blocks = 2, size = 5, score = max)",
    "topk(blocks = 2, size = 5, score = mass)",
    "topk(mass = 0.5, size = 5, score = bound, queries = 1)",
    "lsh(chunk = 8, rounds = 2)",
    "lsh(buckets = 6, rounds = 3, chunk = 4, seed = 0)",
    "lsh(buckets = 8, rounds = 3, chunk = 4, hash = hyperplanes, share_qk = false)",
    "cluster(count = 4)",
    "cluster(of = q, count = 4)",
    "cluster(count = 4, assign = balanced)",
    "sinkhorn(size = 4)",
)


@pytest.mark.parametrize("call", SCORED)
def test_scoring_takes_the_products_that_are_counted_and_the_sums_of_blocks(call: str) -> None:
    n, d, heads, batch = 60, 6, 3, 2
    spec = parse(f"attention a {{ heads {heads} attend {call} }}")
    q = torch.randn(batch, heads, n, d, generator=torch.Generator().manual_seed(0))
    module = spec.compile(head_size=d)
    with FlopCounterMode(display=False) as counter:
        module.pairs(q, q)
    # a block is known by a sum over its keys
    summed = "size" in call and "max" not in call and "score = mass" not in call
    expected = counter.get_total_flops() + summed * batch * heads * n * d
    report = spec.analyse(n, head_dim=d, batch=batch)
    assert report.scoring_flops == expected
    assert report.quality["scoring_flops"] == "bound"


@pytest.mark.parametrize(
    "graph",
    [
        "input s: scores(size = 4) attend topk(blocks = 1, size = 4, score = s)",
        "input x: ids attend cluster(x)",
        "attend window(radius = 3)",
    ],
)
def test_what_is_given_is_not_scored(graph: str) -> None:
    assert parse(f"attention a {{ {graph} }}").analyse(24).scoring_flops == 0


def test_inputs_that_decide_need_no_tensors() -> None:
    spec = parse(
        "attention a { input s: scores(size = 4) attend topk(blocks = 1, size = 4, score = s) }"
    )
    scores = np.zeros((1, 3, 3))
    scores[0, :, 1] = 1
    report = spec.analyse(12, inputs={"s": scores})
    assert report.edges == 12 * 4
    assert report.unread_keys == 8


@pytest.mark.parametrize("body", ["topk(keys = 2)", "full"])
def test_tensors_of_another_shape_are_refused(body: str) -> None:
    spec = parse(f"attention a {{ attend {body} }}")
    fits = torch.zeros(1, 8, 4)
    for given in (torch.zeros(1, 9, 4), torch.zeros(1, 1, 8, 4), torch.zeros(1, 8, 4).int()):
        with pytest.raises(ValueError, match=r"`tensors` are q and k of one sample"):
            spec.analyse(8, tensors=(fits, given))
    for other in (None, "k", object()):
        with pytest.raises(TypeError, match=r"k of `tensors` must be an array"):
            spec.analyse(8, tensors=(fits, other))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["moba", "msa", "routing_transformer", "scatterbrain", "sinkhorn"])
def test_a_picture_is_of_a_sample_and_says_so(name: str) -> None:
    args = ["show", str(EXAMPLES / f"{name}.attn"), "-n", "48"]
    one, other = (CliRunner().invoke(main, args) for _ in range(2))
    assert one.exit_code == 0
    assert one.output == other.output
    assert "a sample: what random queries and keys decide" in one.output


def test_reach_says_that_tensors_choose() -> None:
    report = parse("attention a { causal attend topk(keys = 3) }").analyse(30)
    assert "at least, as if tensors could choose any pair that is allowed" in str(report)


def test_queries_of_one_choice_lie_in_as_many_blocks_as_that() -> None:
    for shared, size in itertools.product(range(1, 13), repeat=2):
        rows = [range(row * shared, (row + 1) * shared) for row in range(2 * size)]
        most = max(len({q // size for q in row}) for row in rows)
        assert TopK(blocks=1, size=size, queries=shared).own_blocks == most, (shared, size)


def test_no_more_blocks_are_forced_and_no_more_keys_read_than_is_said() -> None:
    around = BY_NAME["window"](before=3, after=0)  # type: ignore[call-arg]
    sets = (None, around, BY_NAME["causal"](), BY_NAME["block"](size=5))  # type: ignore[call-arg]
    for n, size, shared, causal, always in itertools.product(
        (1, 7, 24), (1, 3, 4), (1, 3, 4), (False, True), sets
    ):
        rows = [range(at, min(n, at + shared)) for at in range(0, n, shared)]
        blocks = [range(at, min(n, at + size)) for at in range(0, n, size)]

        def is_forced(row: range, block: range, of=always, n=n, causal=causal, size=size) -> bool:  # type: ignore[no-untyped-def]
            if of is None:
                return causal and size > 1 and any(q in block for q in row)
            pairs = itertools.product(row, block)
            return any(of.holds(q, k, n) and not (causal and k > q) for q, k in pairs)

        most = max(sum(is_forced(row, block) for block in blocks) for row in rows)
        call: dict[str, Any] = {"size": size, "queries": shared, "always": always, "causal": causal}
        leaf = TopK(blocks=2, **call)
        if always is None:
            # as of a long sequence
            assert most <= leaf.forced(n) <= (leaf.own_blocks if causal and size > 1 else 0)
        else:
            assert leaf.forced(n) == most
        assert leaf.most_keys(n) == min(n, size * max(2, leaf.forced(n)))
        assert leaf.about_keys(n) == min(n, 2 * size)
        full = 2 <= leaf.forced(n) and 2 * size < n
        assert ("none is left to choose" in leaf.doubt(n)) == full
        for open_ended in (TopK(mass=0.5, **call), TopK(above=0.5, **call)):
            assert open_ended.most_keys(n) == n
            assert not open_ended.doubt(n)
        assert bool(leaf.waits) == (shared > 1)


@pytest.mark.parametrize("share", ["0", "-0.5"])
def test_a_mass_of_nothing_is_refused(share: str) -> None:
    with pytest.raises(SpecError, match="`mass` must be above 0"):
        parse(f"attention a {{ attend topk(mass = {share}, size = 4) }}")

"""What a device is not asked for where the data decide: the same pairs come out in tensors of known
size, on tensors without numbers nothing is asked, and what must be asked is said."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from interpreted import interpreted
from listed_calls import LISTS, a_call, agree, chosen, of_compositions, sorted_graphs
from sweeps import in_turn
from test_waiting import ELSEWHERE, nothing_runs, waits

from attnspec.backends.common import asking
from attnspec.backends.decided.ranking import best, listed
from attnspec.backends.planner import backend_of, plan
from attnspec.backends.triton.backend import TritonBackend
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation, decided_in
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call, Work
from attnspec.runtime.decisions import data_of, decided, decisions_of
from attnspec.spec import parse

__all__ = ["interpreted", "nothing_runs"]


def unask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU goes the way of a device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("attnspec.backends") and getattr(module, "asks", None) is not None:
            monkeypatch.setattr(module, "asks", lambda x: False)
    assert not asking.asks(torch.zeros(1))


GRAPHS: dict[str, Relation] = {
    **sorted_graphs(),
    **{name: each for name, each in of_compositions().items() if name in ("all", "both")},
    "topk, rows": Intersection((Causal(), TopK(blocks=2, size=8, queries=1, causal=True))),
    "topk, shared": Union((TopK(blocks=2, size=8, queries=16, causal=True), Window(2, 0))),
    "topk, keys": TopK(keys=5),
    "topk, all heads": TopK(blocks=2, size=4, share="all"),
    "topk, groups": TopK(blocks=3, size=4, share="group", queries=3, score="max"),
}

N = 61


def call_of(name: str, padded: bool, n_q: int = N) -> tuple[Work, tuple[torch.Tensor, ...], Call]:
    torch.manual_seed(0)
    relation = GRAPHS[name]
    hashed = any(isinstance(x, Lsh) and x.share_qk for x in decided_in(relation))
    work = Work(relation, n_q, N, unit_keys=hashed)
    data = {
        "sel": torch.randint(-1, 4, (2, 2, n_q, 2)),
        "other": torch.randint(-1, 8, (2, 1, n_q, 2)),
    }
    padding = torch.arange(N) >= torch.tensor([3, N // 3])[:, None] if padded else None
    return work, *a_call(work, 2, 2 if "topk" in name else 1, padding, data)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_is_decided_and_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.arange(N)[:, None], torch.arange(N)[None]
    for padded, n_q in ((False, N), (True, 30)):
        at = q[N - n_q :]
        work, _, call = call_of(name, padded, n_q)
        before = [call.data[leaf].holds(at, k).expand(2, 2, -1, -1) for leaf in work.decided]
        with monkeypatch.context() as patch:
            unask(patch)
            _, tensors, call = call_of(name, padded, n_q)
            after = [call.data[leaf].holds(at, k).expand(2, 2, -1, -1) for leaf in work.decided]
            agree(work, 2, tensors, call, LISTS)
        real = slice(None) if call.padding is None else call.padding[:, None, N - n_q :, None]
        for one, other in zip(before, after, strict=True):
            if call.padding is None:
                assert torch.equal(one, other)
            else:
                both = call.padding[:, None, None] & real  # type: ignore[operator]
                assert torch.equal(one & both, other & both)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name",
    [
        "topk, shared",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("all", "lsh, apart, in buckets")),
    ],
)
def test_kernels_of_a_gpu_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unask(monkeypatch)
    work, tensors, call = call_of(name, padded=True)
    agree(work, 2, tensors, call, TritonBackend())


def test_the_best_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    scores = torch.randint(0, 9, (40, 33)).float()
    scores[3], scores[4, 5], scores[5, 7:9] = -torch.inf, torch.nan, torch.inf
    forced = torch.rand(40, 33) < 0.05
    most = int(forced.sum(-1).max())
    for own, budget in ((None, 4), (forced, 4), (forced, 1), (None, 50)):
        plain = best(scores, own, budget)
        with monkeypatch.context() as patch:
            unask(patch)
            found = best(scores, own, budget, most)
        width = found.shape[-1]
        assert width == min(33, max(budget, most if own is not None else 0))
        assert torch.equal(found[:, width - plain.shape[-1] :], plain)
        assert (found[:, : width - plain.shape[-1]] == -1).all()
    plain = listed(forced)
    unask(monkeypatch)
    found = listed(forced, most + 2)
    assert found.shape == (40, most + 2)
    assert torch.equal(found[:, 2:], plain)


# --- tensors without numbers ---------------------------------------------------------------------

FREE = (
    "causal attend topk(blocks = 3, size = 32, queries = 32)",
    "causal attend topk(blocks = 3, size = 32, queries = 1, score = bound)",
    "causal attend topk(keys = 16)",
    "causal attend window(before = 31, after = 0) | topk(blocks = 3, size = 32, queries = 32)",
    "causal input c: choices(size = 32) attend window(before = 63, after = 0) | chosen(c)",
    "causal input c: choices attend chosen(c)",
    "causal attend lsh(rounds = 2, chunk = 32)",
    "attend lsh(rounds = 2, chunk = 32, cut = bucket, share_qk = false)",
)

ASKED = {
    "causal input x: scores(size = 32) attend topk(mass = 0.9, size = 32, score = x)": (
        "how many blocks are taken"
    ),
    "attend topk(blocks = 3, size = 32, always = columns(first(32)))": "how many blocks are forced",
    "attend cluster(count = 4, assign = balanced)": "how many centroids take a token",
}


def moved_by(body: str, padded: bool, shared: int = 1) -> list[str]:
    """What the choice of a call, its output and its gradients wait for; so many heads share
    keys."""
    program, n = parse(f"attention sample {{ {body} }}").program, 320
    ((work, heads),) = works = works_of(program, 0, 2 * shared, n, n, stand_ins(program))
    kernel: Any = backend_of("triton").build(work, heads, ELSEWHERE)
    decisions = decisions_of(works)
    padding = torch.ones(2, n, dtype=torch.bool, device=ELSEWHERE) if padded else None
    made = {"choices": ((2, 2, n, 4), torch.int64), "scores": ((2, 2, 10, 10), torch.float32)}
    data = {}
    for entry in program.inputs:
        shape, kind = made[entry.kind]
        data[entry.name] = torch.zeros(shape, dtype=kind, device=ELSEWHERE)
    tables = {"centroids": torch.zeros(2, 4, 16, device=ELSEWHERE)}

    def call(parts: Any) -> torch.Tensor:
        q, k, v = parts
        choices = decided(decisions, q, k, padding, data, lambda each: tables)
        mine = Call(padding, data=data_of(work, heads, decisions, choices, data))
        found: torch.Tensor = kernel(q, k, v, mine)
        return found

    shapes = [(2, 2 * shared, n, 16), (2, 2, n, 16), (2, 2, n, 16)]
    return waits(call, [torch.empty(x, device=ELSEWHERE).requires_grad_() for x in shapes])


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("body", "padded"), [*in_turn(FREE, (True, False)), ("attend cluster(count = 4)", False)]
)
def test_nothing_is_asked(body: str, padded: bool) -> None:
    assert not moved_by(body, padded=padded)
    assert "waits for the device" not in steps_of(body)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("body", [FREE[0], FREE[4], FREE[0].replace("32)", "32, share = head)")])
def test_nothing_is_asked_of_heads_that_share_keys(body: str) -> None:
    assert not moved_by(body, padded=True, shared=4)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("body", ASKED)
def test_what_is_asked_is_said(body: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|nonzero"):
        moved_by(body, padded=False)
    assert f"a call waits for the device, to know {ASKED[body]}" in steps_of(body)


def steps_of(body: str) -> str:
    return str(plan(parse(f"attention sample {{ {body} }}").program, 320, "cuda", "triton"))


def test_a_gpu_is_told_what_an_input_must_be() -> None:
    leaf, data = chosen(9, 9, 4, 2, 1)
    work = Work(leaf, 9, 9)
    data["sel"][0, 0, 0, 0] = 7
    with pytest.raises(ValueError, match=r"0 … 2, 4 of 9 keys each, .* got 7"):
        a_call(work, 2, 1, None, data)

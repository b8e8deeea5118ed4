"""Graphs that the data decide in Triton kernels, under the interpreter, against the dense
definition: values, log-sum-exps and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import interpreted
from listed_calls import CPU, a_call, agree, chosen, of_compositions, sorted_graphs

from attnspec.backends.triton import tables
from attnspec.backends.triton.backend import TritonBackend
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation, decided_in
from attnspec.graphs.token_sets import InputTokens, StandIn
from attnspec.lower.work import Work
from attnspec.spec import parse

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted")

TRITON = TritonBackend()


@pytest.mark.parametrize(
    ("of", "heads", "shared"),
    [
        *(("head", 2, 1), ("one", 2, 1), ("head", 3, 3), ("one", 3, 3), ("one", 16, 16)),
        pytest.param("head", 16, 16, marks=pytest.mark.slow),
    ],
)
def test_chosen_blocks(of: str, heads: int, shared: int) -> None:
    torch.manual_seed(0)
    leaf, data = chosen(11, 11, 4, 2, heads if of == "head" else 1)
    work = Work(Intersection((Causal(), leaf)), 11, 11)
    agree(work, heads, *a_call(work, heads, shared, None, data), TRITON)


def test_padding_and_fewer_queries() -> None:
    torch.manual_seed(0)
    leaf, data = chosen(9, 17, 6, 2, 2)
    padding = torch.arange(17) < torch.tensor([17, 10])[:, None]
    work = Work(Union((Intersection((Causal(), leaf)), Window(3, 0))), 9, 17, normalize="softmax1")
    agree(work, 2, *a_call(work, 2, 1, padding, data), TRITON)


@pytest.mark.parametrize("name", of_compositions())
def test_compositions(name: str) -> None:
    torch.manual_seed(0)
    n, relation = 14, of_compositions()[name]
    data = {"sel": torch.randint(-1, 1, (2, 2, n, 2)), "other": torch.randint(-1, 2, (2, 1, n, 2))}
    work = Work(relation, n, n)
    agree(work, 2, *a_call(work, 2, 1, None, data), TRITON)


@pytest.mark.parametrize("kind", ["tokens", "ids"])
def test_inputs_decide_what_stands_beside(kind: str) -> None:
    torch.manual_seed(0)
    leaf, data = chosen(9, 17, 6, 2, 2)
    if kind == "tokens":
        beside: Relation = Union((Global(InputTokens(StandIn("x"))), Window(1, 1)))
        data["x"] = torch.rand(2, 1, 17) < 0.2
    else:
        beside = Intersection((Same(StandIn("x")), Window(4, 0)))
        data["x"] = torch.randint(0, 3, (2, 1, 17))
    work = Work(Union((leaf, beside)), 9, 17, reads=("sel", "x"))
    kernel: Any = TRITON.build(work, (0, 1), CPU)
    assert kernel.beside is not None
    agree(work, 2, *a_call(work, 2, 1, None, data), TRITON)


LEAVES = {
    **{name: each for name, each in sorted_graphs().items() if "multiplied" not in name},
    "topk, rows": TopK(blocks=2, size=8, queries=1),
    "topk, keys": TopK(keys=5),
}

QUICK = ("lsh, causal", "clusters, beside", "topk, rows")


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in LEAVES]
)
def test_choices(name: str) -> None:
    torch.manual_seed(0)
    n, leaf = 29, LEAVES[name]
    hashed = any(isinstance(x, Lsh) and x.share_qk for x in decided_in(leaf))
    work = Work(leaf, n, n, unit_keys=hashed)
    padding = torch.arange(n) >= torch.tensor([0, n // 3])[:, None]
    shared = 2 if "topk" in name else 1
    agree(work, 2, *a_call(work, 2, shared, padding, {}), TRITON)


def test_keys_that_many_read_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SHORTEST", 2)
    monkeypatch.setattr(tables, "LONGEST", 0)
    torch.manual_seed(0)
    leaf, data = chosen(11, 11, 4, 2, 1)
    data["sel"][..., 0] = 0
    work = Work(Intersection((Causal(), leaf)), 11, 11)
    agree(work, 16, *a_call(work, 16, 16, None, data), TRITON)


@pytest.mark.parametrize("n", [0, 1, 13])
def test_modules(n: int) -> None:
    torch.manual_seed(0)
    body = "causal attend topk(blocks = 2, size = 4, queries = 1) | window(before = 3, after = 0)"
    q, k, v = (torch.randn(2, 2, n, 8) for _ in range(3))
    spec = parse(f"attention decided {{ {body} }}")
    outs = [spec.compile(backend=backend)(q, k, v) for backend in ("triton", "dense")]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    for body, reason in (
        ("attend lsh(rounds = 2, chunk = 4, multiplicity = true)", "`lsh` weighs pairs"),
        ("heads 1 attend topk(keys = 3) score alibi()", "its scores are changed"),
        ("attend cluster(of = q)", "means of queries"),
    ):
        spec = parse(f"attention decided {{ {body} }}")
        refusals = {
            each.backend.name: each.refusal for each in spec.plan(256, "cuda").steps[0].candidates
        }
        assert reason in str(refusals["triton"])

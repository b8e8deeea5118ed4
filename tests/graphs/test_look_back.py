"""How many keys generation keeps: those that a later query may read, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle.scalars import Invalid
from oracle.tree import Attention, Node, pattern, text
from population import inputs_of, spec_of
from specs import predicates, ten
from sweeps import few
from torch import Tensor
from views import Call, Case, step_errors

from attnspec import parse

N = 48


def tensors_of(part: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that something holds."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part
        return
    inside = part if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values()
    for each in inside:
        yield from tensors_of(each, seen)


def keys_kept(body: str) -> int:
    """How many keys a stream holds after so many single steps."""
    spec = spec_of(f"causal {body}")
    module: Any = spec.compile()
    state: Any = None
    q = torch.randn(1, 1, N, 3)
    given = {x: torch.from_numpy(np.stack([y])) for x, y in inputs_of(spec, N).items()}
    for at in range(N):
        one = q[:, :, at : at + 1]
        inputs: dict[str, Any] = {name: x[:, at : at + 1] for name, x in given.items()}
        _, state = module.step(one, one, one, state, **({"inputs": inputs} if inputs else {}))
    # keys and values
    return sum(x.numel() for x in tensors_of(state.parts, set()) if x.shape[-1:] == (3,)) // 6


@pytest.mark.parametrize(
    ("graph", "kept"),
    [
        ("where(q - k in {0, 1, 5})", 5),
        ("where(q - k <= 7)", 7),
        ("where(0 <= q - k and q - k < 8)", 7),
        ("where(q - k <= 7.5)", 7),
        ("where((q - k) / 3 <= 2)", 6),
        ("where((q - k) ** 2 <= 49)", 7),
        ("where(3 * q <= 3 * k + 21)", 7),
        ("where(q // 4 == k // 4)", 3),
        ("where(q // 4 - k // 4 <= 1 and k % 3 != 1)", 7),
        ("where(k < 4 or q - k <= 7)", 4 + 7),
        ("where(q * k < 30)", 5),
        ("~where(q - k > 7)", 7),
        ("window(radius = 4) - where(k % 2 == 0)", 4),
        ("where(q - k <= 7) | columns(first(2))", 2 + 7),
        ("shift(columns(first(2)), by = 3)", 5),
        ("shift(window(radius = 4) | columns(first(2)), by = 3)", 5 + 4),
        ("block(size = 4, before = 1) | columns(positions(0, 4..5))", 6 + 7),
        ("columns(first(9)) | columns(first(2)) | dilated(radius = 6, step = 3)", 9 + 6),
        ("(window(radius = 9) | columns(first(20))) & window(radius = 12)", 12),
        ("columns(first(9) & positions(3..30))", 9),
        ("columns(first(2) | positions(5))", 6),
        ("rows(first(3))", 2),
        ("columns(y) | window(before = 2, after = 0)", 4 + 2),
        # what is near needs no marks to be kept
        ("columns(y) & window(before = 9, after = 0)", 9),
        ("window(before = 9, after = 0) & (columns(y) | rows(y))", 9),
        ("columns(y | first(2))", 4 + 2),
        ("columns((y | first(2)) - every(3))", 4 + 2),
        ("columns(y & first(5))", 5),
    ],
)
def test_a_stream_keeps_what_may_be_read(graph: str, kept: int) -> None:
    marked = "(y" in graph
    assert keys_kept(f"{'input y: tokens(at_most = 4) ' * marked}attend {graph}") <= kept + marked


@pytest.mark.parametrize(
    "graph", ["where(q - k > 7)", "where(q % 8 == k % 8)", "columns(y)", "same(x)"]
)
def test_graphs_without_a_bounded_look_back_need_keep_all(graph: str) -> None:
    inputs = {"same(x)": "input x: ids", "columns(y)": "input y: tokens"}.get(graph, "")
    with pytest.raises(ValueError, match="keep_all"):
        keys_kept(f"{inputs} attend {graph}")


@pytest.mark.parametrize("seed", few(range(3), 3))
def test_nothing_that_a_predicate_reads_is_forgotten(seed: int) -> None:
    def asked(predicate: Node) -> None:
        tree = Attention((Node("attend", (pattern("where", predicate),)),), causal=True)
        case = Case(parse(text(tree)), 24, tree)
        try:
            assert step_errors(Call(case, "plain", torch.float64)) == []
        except (Invalid, ValueError):
            # no value at some pair, or other rows at another length
            return

    ten(asked, seed, predicates)

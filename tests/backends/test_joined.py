"""Heads of different graphs, and samples of different padding, in the calls of one sequence."""

from __future__ import annotations

import pytest
import torch
from attention_checks import module_of, spec_of, tensors
from zoo import EXAMPLES

from attnspec.backends.planner import backend_of
from attnspec.limits import LIMITS
from attnspec.lower.work import Joining, Work
from attnspec.spec import load

BODIES = {
    "random blocks": "attend block(size = 16, before = 1, after = 1) | global(first(16))"
    " | random_blocks(size = 16, blocks = 2, seed = 7)",
    "windows": "causal attend window(before = 3 + head, after = 0)",
    "softmax1": "causal attend window(before = 3 + head, after = 0) normalize softmax1",
    "out of order": "attend window(radius = 9) head 2 { attend window(radius = 20) }",
}


@pytest.mark.parametrize("backend", ["bands", "torch"])
def test_joined_heads_where_the_fast_way_cannot_go(backend: str) -> None:
    body = "heads 4 " + BODIES["random blocks"]
    module, same = module_of(body, backend), module_of(body, "dense")
    q, k, v = (x.detach() for x in tensors(2, 4, 40, 40, key_heads=2))
    many = torch.func.vmap(lambda *x: module(*(y[None] for y in x))[0])(q, k, v)
    torch.testing.assert_close(many, same(q, k, v), rtol=0, atol=1e-12)
    out, lse = torch.compile(
        lambda *x: module(*x, return_lse=True), backend="eager", fullgraph=True
    )(q, k, v)
    meant = same(q, k, v, return_lse=True)
    torch.testing.assert_close((out, lse), meant, rtol=0, atol=1e-12)


def test_groups_of_heads_where_torchs_call_takes_the_larger_alone() -> None:
    # ten heads of 700 x 700 scores go through it under dropout, two by the definition
    spec = load(EXAMPLES / "blockbert.attn")
    q, k, v = tensors(1, 12, 700, 700, dtype=torch.float32)
    dropped = spec.compile("torch")(q, k, v, dropout_p=1e-12)
    torch.testing.assert_close(dropped, spec.compile("dense")(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["bands", "torch"])
def test_what_differs_in_more_than_its_pairs_is_not_joined(backend: str) -> None:
    found = backend_of(backend)
    assert isinstance(found, Joining)
    near, far = (spec_of(f"attend window(radius = {r})").relation(100) for r in (3, 30))
    assert found.joins([Work(near, 100, 100), Work(far, 100, 100)])
    assert not found.joins([Work(near, 100, 100), Work(far, 100, 100, scale=2.0)])
    assert not found.joins([Work(near, 100, 100), Work(far, 100, 100, normalize="softmax1")])


def test_as_many_heads_are_one_call_of_torch_as_their_masks_have_room() -> None:
    found = backend_of("torch")
    assert isinstance(found, Joining)
    near, far = (spec_of(f"attend window(radius = {r})").relation(100) for r in (3, 30))
    wide = LIMITS.mask_call // 2
    for n_q, n_k, joined in [(1, wide, True), (1, wide + 1, False), (wide, 2, False)]:
        assert found.joins([Work(near, n_q, n_k), Work(far, n_q, n_k)]) == joined

"""Heads of different graphs, and samples of different padding, in the calls of one sequence."""

from __future__ import annotations

import pytest
import torch
from attention_checks import assert_agree, defined, module_of, spec_of, tensors, with_gradients
from sweeps import checkered
from zoo import EXAMPLES

from attnspec.backends.bands.kernel import JoinedSteps
from attnspec.backends.planner import backend_of
from attnspec.backends.torch_call.backend import MOST
from attnspec.backends.torch_call.kernel import JoinedCall
from attnspec.layout.orders import NATURAL
from attnspec.layout.stacking import stacked
from attnspec.layout.tile_layout import StepLayout, step_layout
from attnspec.layout.tiling import classify
from attnspec.lower.work import Joining, Work
from attnspec.spec import load

BODIES = {
    "random blocks": "attend block(size = 16, before = 1, after = 1) | global(first(16))"
    " | random_blocks(size = 16, blocks = 2, seed = 7)",
    "windows": "causal attend window(before = 3 + head, after = 0)",
    "softmax1": "causal attend window(before = 3 + head, after = 0) normalize softmax1",
    "out of order": "attend window(radius = 9) head 2 { attend window(radius = 20) }",
}


def layout_of(body: str, n_q: int, n: int, tile: int) -> tuple[StepLayout, torch.Tensor]:
    """A graph in tiles of natural order, and its mask."""
    relation = spec_of(body).relation(n)
    found = classify(relation, n_q, n, NATURAL, (tile, tile))
    return step_layout(found, relation, n), torch.from_numpy(spec_of(body).mask(n)[n - n_q :])


@pytest.mark.parametrize("sizes", [(32, 32), (17, 33), (1, 5)])
def test_stacked_layouts_hold_the_pairs_of_each_sequence(sizes: tuple[int, int]) -> None:
    n_q, n = sizes
    bodies = ["attend window(radius = 3)", "attend residue(step = 4)", "attend window(radius = 3)"]
    parts = [layout_of(body, n_q, n, 8) for body in bodies]
    layout = stacked([part for part, _ in parts], n_q, n)
    held = torch.zeros(3 * n_q, 3 * n, dtype=torch.int64)
    q, k = (torch.from_numpy(x) for x in layout.pairs(3 * n))
    held.index_put_((q, k), torch.ones_like(q), accumulate=True)
    meant = torch.block_diag(*(mask.long() for _, mask in parts))  # type: ignore[no-untyped-call]
    assert torch.equal(held, meant)
    # equal masks are kept once
    assert len(layout.masks) <= sum(len(part.masks) for part, _ in parts[:2])


@pytest.mark.parametrize(
    ("name", "way", "key_heads"),
    checkered(BODIES, [("bands", JoinedSteps), ("torch", JoinedCall)], [4, 2]),
)
def test_heads_of_different_graphs_are_one_kernel(
    name: str, way: tuple[str, type], key_heads: int
) -> None:
    backend, kernel = way
    body = "heads 4 " + BODIES[name]
    module, spec = module_of(body, backend), spec_of(body)
    one_by_one = module_of(body, "dense")
    for n_q, n in ((17, 17), (130, 130), (70, 133)):
        given = tensors(3, 4, n_q, n, key_heads=key_heads, out_size=5)
        (group,) = module.engine.prepare(0, 4, key_heads, n_q, n, "cpu").groups
        assert type(group.kernel) is kernel
        padding = torch.rand(3, n) > 0.3
        padding[2] = False
        for mask in (None, padding):
            if name == "softmax1":
                exact = with_gradients(one_by_one(*given, key_padding_mask=mask), given)
            else:
                exact = with_gradients(defined(spec, *given, padding=mask), given)
            found = with_gradients(module(*given, key_padding_mask=mask), given)
            assert_agree(found, exact, exact)


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


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", ["strided", "causal window", "blocks", "where", "empty rows"])
def test_short_samples_of_different_padding(name: str, key_heads: int) -> None:
    from attention_checks import GRAPHS

    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], "bands")
    for n_q, n in ((1, 1), (17, 17), (130, 130), (40, 133)):
        given = tensors(3, 4, n_q, n, key_heads=key_heads, out_size=5)
        padding = torch.ones(3, n, dtype=torch.bool)
        padding[0, n // 2 :] = False
        padding[1, ::3] = False
        exact = with_gradients(defined(spec, *given, padding=padding), given)
        found = with_gradients(module(*given, key_padding_mask=padding), given)
        assert_agree(found, exact, exact)


def test_as_many_heads_are_one_call_of_torch_as_their_masks_have_room() -> None:
    found = backend_of("torch")
    assert isinstance(found, Joining)
    near, far = (spec_of(f"attend window(radius = {r})").relation(100) for r in (3, 30))
    wide = MOST // 2
    for n_q, n_k, joined in [(1, wide, True), (1, wide + 1, False), (wide, 2, False)]:
        assert found.joins([Work(near, n_q, n_k), Work(far, n_q, n_k)]) == joined

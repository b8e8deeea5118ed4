"""Calls of m queries with n keys of another sequence: values, gradients, choices, every way in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import ALONG
from population import spec_of as one_sequence
from sweeps import checkered
from torch import Tensor

from attnspec import Spec
from attnspec.runtime import CompiledAttention

SIZES = ((0, 5), (5, 0), (1, 1), (7, 16), (33, 20), (130, 257))
"""Queries and keys."""

HEADS, KEY_HEADS, WIDTH = 4, 2, 8

GRAPHS = (
    "full",
    "where(abs(q * n - k * m) <= 2 * m) | columns(first(2))",
    "~window(radius = 4) & where(k % 3 != 1)",
    "block(size = 32, before = 1) - transpose(rows(last(3)))",
    "self",
)
READING = (
    "input t: tokens attend columns(t) | window(radius = 2)",
    "input s: length attend prefix(s) & where(k % 2 == 0)",
    "input c: choices(size = 4) attend chosen(c) | window(radius = 2)",
    "input x: numbers attend where(x(k) <= 3) & where(q + k < 20)",
    "input x: numbers attend full - (where(x(k) in {1, 5, 7}) | window(radius = 2))",
    "input t: tokens attend ~transpose(transpose(columns(t) & where(q > k)))",
    "input x: numbers attend where(x(k) // m + x(k) % n <= q)",
)


def spec_of(body: str) -> Spec:
    return one_sequence(f"cross {body}")


def tensors(m: int, n: int) -> list[Tensor]:
    """q, k and v in float64, two queries' heads to a head of keys."""
    generator = torch.Generator().manual_seed(m * 1000 + n)
    shapes = ((HEADS, m, WIDTH), (KEY_HEADS, n, WIDTH), (KEY_HEADS, n, WIDTH - 2))
    parts = [torch.randn(2, *s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in parts]


def padding_of(n: int) -> Tensor:
    return torch.rand(2, n) > 0.2


def inputs_of(spec: Spec, m: int, n: int) -> dict[str, Tensor]:
    every = {
        "tokens": torch.rand(2, n) > 0.7,
        "length": torch.randint(0, n + 1, (2,)),
        "choices": torch.randint(-1, -(-n // 4), (2, HEADS, m, 3)),
        "numbers": torch.arange(n).flip(0).expand(2, n) % 9,
    }
    return {name: every[entry.kind] for name, entry in spec.inputs.items()}


def assert_computes(
    module: CompiledAttention, parts: list[Tensor], pairs: Tensor, **given: Any
) -> None:
    """Outputs, log-sum-exps and gradients are those of the formula, pairs [B, H, m, n] or less."""
    found = module(*parts, return_lse=True, **given)
    (q, *keys), padding = parts, given.get("key_padding_mask")
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in keys)
    scores = q @ k.mT / WIDTH**0.5
    held = pairs.expand(scores.shape)
    held = held if padding is None else held & padding[:, None, None]
    some = held.any(-1)
    # a row without a pair is cut off, so that nothing of it is infinite
    scores = scores.masked_fill(~held & some[..., None], -torch.inf)
    sums = scores.logsumexp(-1) if k.shape[2] else scores.new_zeros(scores.shape[:3])
    meant = scores.softmax(-1) * held @ v, sums.masked_fill(~some, -torch.inf)
    weight, grads = torch.randn_like(found[0]), []
    for out, lse in (found, meant):
        loss = (out * weight).sum() + lse[some].sum()
        grads.append(torch.autograd.grad(loss, parts, materialize_grads=True))
    for one, other in zip((*found, *grads[0]), (*meant, *grads[1]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("body", "padded"),
    checkered((*(f"attend {x}" for x in GRAPHS), *READING), (False, True)),
)
def test_calls_are_the_dense_formula(body: str, padded: bool) -> None:
    spec = spec_of(body)
    module = spec.compile()
    for m, n in SIZES if body not in READING else SIZES[2:5]:
        # numbers of padding are others than they are given
        padding = padding_of(n) if padded and "numbers" not in body else None
        inputs = inputs_of(spec, m, n)
        masks = [
            [
                spec.mask(n, 0, h, {x: y[b].numpy() for x, y in inputs.items()}, m=m)
                for h in range(HEADS)
            ]
            for b in range(2)
        ]
        given = {"inputs": inputs, "key_padding_mask": padding}
        assert_computes(module, tensors(m, n), torch.tensor(np.array(masks)), **given)


@pytest.mark.parametrize("backend", ["dense", "torch", "tables", "edges"])
def test_every_backend_takes_two_sequences(backend: str) -> None:
    spec = spec_of(f"attend {GRAPHS[1]}")
    module = spec.compile(backend=backend)
    for m, n in ((12, 5), (33, 70)):
        pairs = torch.from_numpy(spec.mask(n, m=m))
        assert_computes(module, tensors(m, n), pairs, key_padding_mask=padding_of(n))


@pytest.mark.parametrize("count", [1, 5, 40])
def test_queries_that_come_later_are_rows_of_a_call_with_all(count: int) -> None:
    spec = spec_of("attend window(radius = 4) | where((q + k) % 7 == 0) | columns(last(2))")
    module, (q, k, v) = spec.compile(), tensors(60, 23)
    whole = module(q, k, v)
    for start in (*range(0, 60, count), 0):
        part = module(q[:, :, start : start + count], k, v, query_start=start)
        torch.testing.assert_close(part, whole[:, :, start : start + count])
    far = [[(i + j) % 7 == 0 or j >= 21 for j in range(23)] for i in range(10**6, 10**6 + count)]
    parts = [q[:, :, :count].detach().requires_grad_(), k, v]
    assert_computes(module, parts, torch.tensor(far), query_start=10**6)
    held = module.pairs(q[:, :, :count], k, query_start=10**6)
    assert torch.equal(held, torch.tensor(far).expand(2, HEADS, -1, -1))


@pytest.mark.parametrize(
    "body",
    [
        "topk(keys = 5)",
        "topk(blocks = 2, size = 4, queries = 1)",
        "topk(keys = 2, within = where(k % 3 != 1))",
        *("linear()", "favor(features = 16)", "rfa(features = 8)", "taylor()", "efficient()"),
        *("rbf(features = 16)", "linformer(rank = 4)"),
    ],
)
def test_each_query_by_itself_is_the_last_of_one_sequence(body: str) -> None:
    two, one = (f(f"attend {body}").compile(head_size=8).double() for f in (spec_of, one_sequence))
    one.load_state_dict(two.state_dict())
    for m, n in ((1, 1), (7, 16), (14, 9)):
        (q, k, _), v = tensors(m, n), torch.randn(2, KEY_HEADS, n, WIDTH, dtype=torch.float64)
        for padding in (None, padding_of(n) | (torch.arange(n) >= n - 1)):
            rest = {"key_padding_mask": padding}
            rows = [one(q[:, :, i : i + 1], k, v, **rest) for i in range(m)]
            meant, out = torch.cat(rows, 2), two(q, k, v, **rest)
            torch.testing.assert_close(out, meant)
            weight = torch.randn_like(out)
            both = [torch.autograd.grad(x, (q, k), weight) for x in (out, meant)]
            torch.testing.assert_close(*both)
    for m, n in ((0, 5), (5, 0)):
        q, k, _ = tensors(m, n)
        assert not two(q, k, k).any()


@pytest.mark.parametrize("graph", GRAPHS)
def test_numbers_of_pairs_have_a_row_for_each_query(graph: str) -> None:
    spec = spec_of(f"input near: pairs attend {graph} score s + near(q, k)")
    for m, n in SIZES:
        q, k, v = (x[:, :2] for x in tensors(m, n))
        near = torch.randn(2, 1, m, n, dtype=torch.float64, requires_grad=True)
        mask = torch.from_numpy(spec.mask(n, m=m))
        out = spec.compile()(q, k, v, inputs={"near": near})
        weights = (q @ k.mT / WIDTH**0.5 + near).masked_fill(~mask, -torch.inf).softmax(-1)
        meant = weights.nan_to_num() @ v
        torch.testing.assert_close(out, meant)
        (grad,) = torch.autograd.grad(out.square().sum(), near, materialize_grads=True)
        total = meant[:, :, mask.any(-1)].square().sum()
        (slopes,) = torch.autograd.grad(total, near, materialize_grads=True)
        torch.testing.assert_close(grad, slopes.nan_to_num())


def test_inputs_of_another_type_than_the_call() -> None:
    # alone in a score they decide no type
    module = spec_of("input near: pairs attend full score near(q, k)").compile()
    near = torch.randn(2, 1, 3, 2, dtype=torch.float64)
    q, k, v = (x.float() for x in tensors(3, 2))
    meant = near.float().softmax(-1) @ v.repeat_interleave(HEADS // KEY_HEADS, 1)
    torch.testing.assert_close(module(q, k, v, inputs={"near": near}), meant)


PLAIN = "attend window(radius = 3) | where((q + k) % 7 == 0)"


def test_transforms_and_emitted_modules_know_the_start() -> None:
    module, parts = spec_of(PLAIN).compile(), tensors(30, 10)
    mapped = torch.func.vmap(lambda q, k, v: module(q, k, v, query_start=2))
    whole = mapped(*(torch.stack([x, 2 * x]) for x in parts))
    torch.testing.assert_close(whole[1], module(*(2 * x for x in parts), query_start=2))
    few = [x[:1, :, :4, :2].detach().requires_grad_() for x in parts]
    assert torch.autograd.gradcheck(lambda *x: module(*x, query_start=2), few, **ALONG)
    names: dict[str, Any] = {}
    exec(compile(spec_of(PLAIN).emit(), "emitted", "exec"), names)
    out = names["Sample"]()(*parts, query_start=5)
    assert torch.equal(out, module(*parts, query_start=5))
    # the class of one sequence has no such argument
    assert "query_start" not in one_sequence("attend full").emit()

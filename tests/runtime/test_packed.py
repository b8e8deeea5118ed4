"""Packed documents: what a loop over them returns, in values and gradients, nested or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_checks import spec_of, with_gradients

from attnspec import packed
from attnspec.graphs.patterns import PATTERNS
from attnspec.runtime import CompiledAttention
from attnspec.runtime.packed import _is_part
from attnspec.spec import parse

LENGTHS = (4, 0, 7, 1, 7, 13, 4)
TOKENS = sum(LENGTHS)

TOGETHER = (
    "causal attend full",
    "attend full score alibi()",
    "causal attend window(before = 3, after = 0)",
    "attend window(radius = 2) | residue(step = 3)",
    "causal attend strided(stride = 3)",
    "attend powers(base = 2) - self",
    "attend ~dilated(radius = 5, step = 2)",
    "heads 4 attend full score bias(buckets = 4) normalize relu head 1 { attend self | causal }",
    "layers 2 heads 4 attend window(radius = 2 + layer + head) normalize softmax1",
    "input d: ids attend same(d) score softcap(cap = 2)",
)
"""Whose pairs depend on q - k and on labels alone."""

EACH = (
    "causal attend window(before = isqrt(n), after = 0)",
    "attend global(first(1)) | window(radius = 1)",
    "attend block(size = 3)",
    "attend random(keys = 2)",
    "attend shift(window(radius = 2), by = 2)",
    "attend where(abs(q - k) < 3)",
    "attend full scale 1 / (n + 1)",
    "causal attend favor(features = 6)",
    "attend nystrom(landmarks = 3)",
    "attend window(radius = 2) + linear()",
    "attend topk(keys = 3)",
    "input l: length attend prefix(l) | self",
    "input t: tokens attend columns(t) | self",
)
"""Which count from somewhere, choose, or mix whole sequences."""


def offsets(lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def module_of(body: str) -> CompiledAttention:
    module = spec_of(body).compile(head_size=8).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def tokens(count: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (
        torch.randn(count, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    return q, k, v


def inputs_of(module: CompiledAttention) -> dict[str, torch.Tensor]:
    kinds = {entry.name: entry.kind for entry in module.program.inputs}
    every = {
        "length": torch.tensor(LENGTHS) // 2,
        "ids": torch.arange(TOKENS) // 3,
        "tokens": torch.arange(TOKENS) % 5 == 1,
    }
    return {name: every[kind] for name, kind in kinds.items()}


def looped(
    module: CompiledAttention,
    parts: Sequence[torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    layer: int = 0,
) -> torch.Tensor:
    """The definition: one call for each document."""
    ends, outs = offsets().tolist(), []
    for i, (start, stop) in enumerate(pairwise(ends)):
        mine = {
            name: x[i : i + 1] if len(x) == len(LENGTHS) else x[start:stop][None]
            for name, x in inputs.items()
        }
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in parts)
        outs.append(module(q, k, v, layer=layer, inputs=mine)[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("body", "together"), [*((b, True) for b in TOGETHER), *((b, False) for b in EACH)]
)
def test_documents_are_each_by_itself(body: str, together: bool) -> None:
    module, parts = module_of(body), tokens()
    inputs, layer = inputs_of(module), 1 if "layers" in body else 0
    assert _is_part(module.program, layer, 4) == together
    found = packed(module, *parts, offsets(), layer=layer, inputs=inputs)
    meant = looped(module, parts, inputs, layer)
    leaves = [*parts, *module.parameters()]
    for one, other in zip(
        with_gradients(found, leaves), with_gradients(meant, leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_every_pattern_that_moves_along_is_tried() -> None:
    along = {each.name for each in PATTERNS if not each.anchored and not each.needs_grid}
    assert {name for name in along if not any(name in body for body in TOGETHER)} == set()


@pytest.mark.parametrize("body", [TOGETHER[2], EACH[1]])
def test_nested_tensors(body: str) -> None:
    module, parts, ends = module_of(body), tokens(), offsets()
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in parts)
    out = packed(module, q, k, v)
    assert out.is_nested
    # of the same documents, so that it can be joined with what came in
    again = (out + q).transpose(1, 2).values()
    found = with_gradients(again, parts)
    meant = with_gradients(packed(module, *parts, ends) + parts[0], parts)
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other)


def test_one_call_does_not_learn_anything_of_its_own() -> None:
    module = module_of(TOGETHER[7])
    before = set(module.state_dict())
    packed(module, *tokens(), offsets())
    assert set(module.state_dict()) == before


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (5,), (1, 1)])
def test_no_documents_and_no_tokens(lengths: tuple[int, ...]) -> None:
    for body in (TOGETHER[0], EACH[1]):
        parts = tokens(sum(lengths))
        out = packed(module_of(body), *parts, offsets(lengths))
        assert out.shape == parts[0].shape
        assert all(
            g.shape == x.shape for g, x in zip(with_gradients(out, parts)[1:], parts, strict=True)
        )


def test_autocast_and_dropout_reach_the_one_call() -> None:
    module, ends = module_of(TOGETHER[0]).float(), offsets()
    q, k, v = (x.detach().float() for x in tokens())
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(module, q, k, v, ends).dtype == torch.bfloat16
    assert not packed(module, q, k, v, ends, dropout_p=1.0).any()


# of torch.compile, for tensors that it finds between two graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_step_calls_it_outside() -> None:
    module, parts, ends = module_of(TOGETHER[0]), tokens(), offsets()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed(module, q.sin(), k, v, ends).cos()

    torch._dynamo.reset()
    found = torch.compile(step, backend="eager")(*parts)
    torch.testing.assert_close(found, step(*parts))


def _wrong() -> list[Any]:
    q, k, v, ends = *(x.detach() for x in tokens()), offsets()
    nested = torch.nested.nested_tensor_from_jagged(q, ends)
    heads = nested.transpose(1, 2)
    others = torch.nested.nested_tensor_from_jagged(k, offsets(LENGTHS[::-1])).transpose(1, 2)
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 8)])
    return [
        ((q, k, v), ValueError, "cu_seqlens must say where documents begin"),
        ((q, k, v, ends.double()), TypeError, r"must be a tensor of integers .* torch.float64"),
        ((q, k, v, ends[None]), TypeError, r"must be a tensor of integers .*\[1, 8\]"),
        ((q, k, v, [0, TOKENS]), TypeError, "must be a tensor of integers .* got list"),
        ((q, k, v, ends[1:]), ValueError, rf"from 0 to the number of tokens, {TOKENS}, got"),
        ((q, k, v, ends[:-1]), ValueError, "must ascend from 0"),
        ((q, k, v, ends[[0, 3, 1, 7]]), ValueError, r"must ascend .* got \[0, 11, 4, 36\]"),
        ((q[None], k, v, ends), ValueError, r"must be \[T, H, d\] of the same T tokens, got q \[1"),
        ((q[1:], k, v, ends), ValueError, r"of the same T tokens, got q \[35, 4, 8\]"),
        ((1, k, v, ends), TypeError, "q must be a tensor, got int"),
        ((q, k[:, :, :4], v, ends), ValueError, "q and k must have one head size"),
        ((heads, heads, heads, ends), ValueError, "leave cu_seqlens out"),
        ((nested, nested, nested), TypeError, r"q must be a jagged nested tensor \[B, H, j, d\]"),
        ((strided, strided, strided), TypeError, "q must be a jagged nested tensor"),
        ((heads, k, v), TypeError, "k must be a jagged nested tensor"),
        (
            (heads, others, heads),
            ValueError,
            "must be nested alike",
        ),
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_does_not_fit() -> None:
    module = module_of(TOGETHER[0])
    for arguments, kind, words in _wrong():
        with pytest.raises(kind, match=words):
            packed(module, *arguments)


def test_wrong_modules_and_inputs() -> None:
    parts, ends = tokens(), offsets()
    with pytest.raises(TypeError, match=r"what spec.compile\(\) returns, got Spec"):
        packed(spec_of("attend full"), *parts, ends)  # type: ignore[arg-type]
    module = module_of(EACH[-2])
    with pytest.raises(ValueError, match=r"`l` must have the shape \[7\], got \[36\]"):
        packed(module, *parts, ends, inputs={"l": torch.arange(TOKENS)})
    with pytest.raises(ValueError, match="needs its input `l`"):
        packed(module, *parts, ends)
    with pytest.raises(ValueError, match="has no input 'd'"):
        packed(module_of(TOGETHER[0]), *parts, ends, inputs={"d": torch.arange(TOKENS)})
    chosen = module_of("input c: choices attend chosen(c)")
    with pytest.raises(ValueError, match="`c` is about heads of one sequence"):
        packed(chosen, *parts, ends, inputs={"c": torch.zeros(1)})


@pytest.mark.parametrize("ends", [[0, 10], [0, 4, 10]])
def test_inputs_that_the_spec_does_not_declare_are_refused_by_its_own_names(
    ends: list[int],
) -> None:
    module = spec_of("causal attend window(radius = 2)").compile()
    q, cut = torch.randn(10, 2, 4), torch.tensor(ends)
    for name in ("z", "document_0"):
        with pytest.raises(ValueError, match=f"no input '{name}'; its inputs: none"):
            packed(module, q, q, q, cut, inputs={name: torch.zeros(10, dtype=torch.int64)})


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 2, after = 0) | columns(first(1))",
        "causal input document: ids attend same(document)",
        "causal input p: length attend where(k >= p)",
        "attend full",
    ],
)
def test_documents_with_fewer_queries_than_keys(body: str) -> None:
    module = parse(f"attention a {{ {body} }}").compile()
    queries, keys = torch.tensor([0, 2, 2, 3, 5]), torch.tensor([0, 5, 7, 8, 13])
    q, k = torch.randn(5, 2, 8, requires_grad=True), torch.randn(13, 2, 8, requires_grad=True)
    values = {"document": torch.arange(13) // 3, "p": torch.tensor([1, 0, 0, 2])}
    inputs = {entry.name: values[entry.name] for entry in module.program.inputs}
    found = packed(module, q, k, k, queries, keys, inputs=inputs)
    parts = []
    for i in range(4):
        (a, b), (c, d) = queries[i : i + 2].tolist(), keys[i : i + 2].tolist()
        one, all_ = (x[None].transpose(1, 2) for x in (q[a:b], k[c:d]))
        own = {x: y[i : i + 1] if x == "p" else y[None, c:d] for x, y in inputs.items()}
        parts.append(module(one, all_, all_, inputs=own)[0].transpose(0, 1))
    torch.testing.assert_close(found, torch.cat(parts))
    grads = [torch.autograd.grad(x.square().sum(), (q, k)) for x in (found, torch.cat(parts))]
    torch.testing.assert_close(*grads)
    nested = [
        torch.nested.nested_tensor_from_jagged(x, at).transpose(1, 2)
        for x, at in ((q, queries), (k, keys), (k, keys))
    ]
    nested[2] = nested[1]
    torch.testing.assert_close(
        packed(module, *nested, inputs=inputs).values().transpose(0, 1), found
    )


def test_more_queries_than_keys_are_refused() -> None:
    module = parse("attention a { causal attend full }").compile()
    q, k = torch.randn(4, 1, 8), torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="got 3 queries and 2 keys in document 1"):
        packed(module, q, k, k, torch.tensor([0, 1, 4]), torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="as many documents, got 2 and 1"):
        packed(module, q, k, k, torch.tensor([0, 1, 4]), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="cu_seqlens_k says where the keys end"):
        packed(module, q, k, k, torch.tensor([0, 1, 4]))

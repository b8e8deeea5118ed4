"""Packed documents: what a loop over them returns, in values and gradients, nested or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from attention_checks import learner_of, with_gradients
from sweeps import checkered
from torch import Tensor

from attnspec import packed
from attnspec.runtime import CompiledAttention

LENGTHS = (4, 0, 7, 1, 7, 13, 4)
SHORT = (2, 0, 3, 1, 7, 1, 2)
"""Queries of each, where there are fewer."""

BODIES = (
    # whose pairs depend on q - k and on labels alone: one call for all
    "causal attend full",
    "attend full score alibi()",
    "causal attend window(before = 3, after = 0)",
    "attend window(radius = 2) | residue(step = 3)",
    "attend powers(base = 2) - self",
    "attend ~dilated(radius = 5, step = 2)",
    "heads 4 attend full score bias(buckets = 4) normalize relu head 1 { attend self | causal }",
    "layers 2 heads 4 attend window(radius = 2 + layer + head) normalize softmax1",
    "input d: ids attend same(d) score softcap(cap = 2)",
    "input d: ids attend window(radius = 2) score s + d(q) - d(k)",
    # which count from somewhere, choose, or mix whole sequences
    "causal attend window(before = isqrt(n), after = 0)",
    "attend global(first(1)) | window(radius = 1)",
    "attend block(size = 3)",
    "causal attend window(radius = 2) score s * (1 + k)",
    "attend random(keys = 2)",
    "attend shift(window(radius = 2), by = 2)",
    "causal attend favor(features = 6)",
    "attend nystrom(landmarks = 3)",
    "attend window(radius = 2) + linear()",
    "attend topk(keys = 3)",
    "input l: length attend prefix(l) | self",
    "input t: tokens attend columns(t) | self",
)


def offsets(lengths: Sequence[int] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def tokens(keys: int = sum(LENGTHS), queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    counts = (keys if queries is None else queries, keys, keys)
    shapes = [(count, heads, 8) for count, heads in zip(counts, (4, 2, 2), strict=True)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


def inputs_of(module: CompiledAttention) -> dict[str, Tensor]:
    at = torch.arange(sum(LENGTHS))
    every = {"length": torch.tensor(LENGTHS) // 2, "ids": at // 3, "tokens": at % 5 == 1}
    return {entry.name: every[entry.kind] for entry in module.program.inputs}


def looped(
    module: CompiledAttention,
    parts: Sequence[Tensor],
    ends: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    layer: int = 0,
) -> Tensor:
    """The definition: one call for each document."""
    outs, bounds = [], [list(pairwise(ends[at].tolist())) for at in (0, -1, -1)]
    for i, spans in enumerate(zip(*bounds, strict=True)):
        slices = [slice(*span) for span in spans]
        q, k, v = (x[at].transpose(0, 1)[None] for x, at in zip(parts, slices, strict=True))
        mine = {
            name: x[i : i + 1] if len(x) == len(LENGTHS) else x[slices[1]][None]
            for name, x in inputs.items()
        }
        outs.append(module(q, k, v, layer=layer, inputs=mine)[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(("body", "short"), checkered(BODIES, [False, True]))
def test_documents_are_each_by_itself(body: str, short: bool) -> None:
    """Also of fewer queries than keys, the last ones of each document; flat or nested."""
    if short and "nystrom" in body:
        pytest.skip("takes the queries of all positions")
    module, parts = learner_of(body), tokens(queries=sum(SHORT) if short else None)
    before, inputs, layer = set(module.state_dict()), inputs_of(module), int("layers" in body)
    ends = [offsets(SHORT), offsets()] if short else [offsets()]
    found = packed(module, *parts, *ends, layer=layer, inputs=inputs)
    leaves = [*parts, *module.parameters()]
    meant = with_gradients(looped(module, parts, ends, inputs, layer), leaves)
    for one, other in zip(with_gradients(found, leaves), meant, strict=True):
        torch.testing.assert_close(one, other)
    # one call for all learns nothing of its own
    assert set(module.state_dict()) == before
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, at).transpose(1, 2)
        for x, at in zip(parts, (ends[0], ends[-1], ends[-1]), strict=True)
    )
    v = k if short else v
    nested = packed(module, q, k, v, layer=layer, inputs=inputs)
    assert nested.is_nested
    # of the same documents as what came in, so that it can be joined with it
    joined = (nested + q).transpose(1, 2).values()
    if not short:
        flat = packed(module, *parts, *ends, layer=layer, inputs=inputs) + parts[0]
        both = (with_gradients(x, parts) for x in (joined, flat))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", [(), (0, 0), (5,)])
@pytest.mark.parametrize("body", [BODIES[0], BODIES[11]])
def test_no_documents_and_no_tokens(body: str, lengths: tuple[int, ...]) -> None:
    parts = tokens(sum(lengths))
    out = packed(learner_of(body), *parts, offsets(lengths))
    assert out.shape == parts[0].shape
    found = with_gradients(out, parts)[1:]
    assert all(g.shape == x.shape for g, x in zip(found, parts, strict=True))


# of torch.compile, for tensors that it finds between two graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_autocast_dropout_and_a_compiled_step() -> None:
    module, parts, ends = learner_of(BODIES[0]).float(), tokens(), offsets()
    q, k, v = (x.detach().float() for x in parts)
    parts = q, k, v
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(module, *parts, ends).dtype == torch.bfloat16
    assert not packed(module, *parts, ends, dropout_p=1.0).any()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed(module, q.sin(), k, v, ends).cos()

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, backend="eager")(*parts), step(*parts))

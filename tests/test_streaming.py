"""A causal attention that goes on from a state: the rows of one call, however it is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pytest
import torch
from attention_checks import spec_of
from test_factored import CASES

from attnspec.keeping import Kept
from attnspec.runtime import CompiledAttention
from attnspec.streaming import StreamState

CAUSAL = [f"causal attend {text}" for text, causal in CASES if causal]
GRAPHS = [
    "causal attend window(before = 7, after = 0)",
    "causal attend window(radius = 4) | global(first(3))",
    "causal attend block(size = 8, before = 1)",
    "causal attend dilated(radius = 12, step = 3) score alibi()",
    "causal attend strided(stride = 5) & window(before = 20, after = 0) normalize relu",
    "causal attend window(before = 9, after = 0) - columns(first(2)) normalize softmax1",
    "causal attend shift(window(radius = 3), by = 2) | columns(positions(0, 4..5))"
    " score softcap(cap = 2)",
    "causal heads 2 attend window(before = 3, after = 0) score bias(buckets = 8)"
    " head 1 { attend window(radius = 5) }",
    "causal heads 2 attend window(before = 3, after = 0) head 1 { attend linear() }",
    "causal attend window(before = 9, after = 0) + linear(feature = exp)",
    "causal attend (window(before = 9, after = 0) | columns(first(2))) + favor(features = 8)",
    "causal attend window(radius = 3) + taylor() score softcap(cap = 2) score alibi()",
]


Given: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def module_of(body: str) -> CompiledAttention:
    module = spec_of(body).compile(head_size=6).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return module


def tensors(n: int, keys: int = 2) -> Given:
    source = torch.Generator().manual_seed(n)
    shapes = ((2, n, 6), (keys, n, 6), (keys, n, 4))
    q, k, v = (torch.randn(3, *s, generator=source, dtype=torch.float64) for s in shapes)
    return q, k, v


def part_of(given: Given, low: int, high: int) -> Given:
    q, k, v = (x[:, :, low:high] for x in given)
    return q, k, v


def in_steps(
    module: CompiledAttention, given: Given, sizes: Sequence[int]
) -> tuple[torch.Tensor, StreamState | None]:
    state: StreamState | None = None
    outs, at = [], 0
    for size in sizes:
        out, state = module.step(*part_of(given, at, at + size), state)
        outs.append(out)
        at += size
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("body", [*CAUSAL, *GRAPHS])
@pytest.mark.parametrize("keys", [1, 2])
def test_steps_are_the_rows_of_one_call(body: str, keys: int) -> None:
    module, given = module_of(body), tensors(83, keys)
    meant = module(*given)
    for sizes in ([1] * 83, [83], [70, 1, 1, 11], [3, 64, 16]):
        found, state = in_steps(module, given, sizes)
        torch.testing.assert_close(found, meant, rtol=1e-8, atol=1e-8)
        assert state is not None
        assert state.position == 83


def test_one_may_go_on_from_a_state_twice() -> None:
    module, given = module_of("causal attend favor(features = 8)"), tensors(30)
    _, state = in_steps(module, given, [20])
    last = part_of(given, 20, 30)
    first, _ = module.step(*last, state)
    again, _ = module.step(*last, state)
    assert torch.equal(first, again)


def test_a_state_does_not_grow() -> None:
    for body, most in (
        ("window(before = 7, after = 0)", 7),
        ("window(radius = 4) | global(first(3))", 7),
    ):
        _, state = in_steps(module_of(f"causal attend {body}"), tensors(50), [20, 30])
        assert state is not None
        (kept,) = state.parts
        assert isinstance(kept, Kept)
        assert kept.keys.shape[2] <= most
    sizes = []
    for n in (10, 60):
        _, state = in_steps(module_of("causal attend linear()"), tensors(n), [n])
        assert state is not None
        sizes.append(state.parts[0].total.shape)  # type: ignore[attr-defined]
    assert sizes[0] == sizes[1] == (6, 6, 5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("attend linear()", "is not causal"),
        ("causal attend residue(step = 3)", "no bound on how far back"),
        ("causal attend window(radius = isqrt(n))", "depends on n"),
        ("causal attend window(radius = 3) | columns(last(2))", "no bound on how far back"),
        ("causal input x: ids attend same(x) & window(radius = 3)", "reads the run-time input `x`"),
    ],
)
def test_what_cannot_go_on_says_why(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module_of(body).step(*tensors(3))


def test_states_are_checked() -> None:
    module, given = module_of("causal attend linear()"), tensors(3)
    with pytest.raises(TypeError, match="state must be what a step returned"):
        module.step(*given, given[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has 2 groups of heads, and 1 are needed"):
        module.step(*given, StreamState(3, (None, None), ""))
    with pytest.raises(ValueError, match="the same positions"):
        module.step(given[0][:, :, :1], *given[1:])


@pytest.mark.parametrize(
    "body",
    [
        "causal attend linear()",
        "causal attend window(before = 4, after = 0)",
        "causal attend window(before = 4, after = 0) + taylor()",
    ],
)
def test_a_state_is_of_such_tensors(body: str) -> None:
    module, (q, k, v) = module_of(body), tensors(3)
    _, state = module.step(q, k, v)
    for other in (
        (q[:1], k[:1], v[:1]),
        (q[:, :1], k[:, :1], v[:, :1]),
        (q, k[:, :1], v[:, :1]),
        (q[..., :3], k[..., :3], v),
        (q, k, v[..., :3]),
        (q.float(), k.float(), v.float()),
    ):
        with pytest.raises(ValueError, match=r"the state is of q \[.* in float64 on cpu, got q \["):
            module.step(*other, state)


@pytest.mark.parametrize("body", [*CAUSAL, *GRAPHS[:2]])
def test_no_positions_and_no_samples(body: str) -> None:
    module, given = module_of(body), tensors(9)
    meant = module(*given)
    found, state = in_steps(module, given, [0, 4, 0, 5, 0])
    torch.testing.assert_close(found, meant)
    assert state is not None
    assert state.position == 9
    q, k, v = (x[:0] for x in given)
    out, state = module.step(q, k, v)
    assert out.shape == meant[:0].shape
    out, state = module.step(q, k, v, state)
    assert state.position == 18


def test_steps_under_autocast_are_as_narrow_as_calls() -> None:
    for body in ("causal attend linear()", "causal attend window(before = 4, after = 0)"):
        module = module_of(body)
        q, k, v = tensors(9)
        given = q.float(), k.float(), v.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            meant = module(*given)
            found, _ = in_steps(module, given, [4, 5])
        assert found.dtype == meant.dtype == torch.bfloat16
        torch.testing.assert_close(found, meant, atol=0.05, rtol=0.05)

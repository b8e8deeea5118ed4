"""A call of a static graph never waits for the device: on tensors that hold no numbers, forward and
backward, nothing asks for one, and nothing is moved to the device or from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ATTENTIONS, smaller

from attnspec.backends import BACKENDS
from attnspec.backends.flex import attention as flex
from attnspec.backends.planner import backend_of, choose
from attnspec.lower.lower import decided_leaves, stand_ins, works_of
from attnspec.lower.work import Bias, Call, Work, refusal_of
from attnspec.runtime import engine, module
from attnspec.spec import Spec, parse

__all__ = ["interpreted"]

ELSEWHERE = torch.device("meta")
"""A device whose tensors have shapes alone: who asks for a number of theirs fails."""


class Unmoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nothing goes from the host to the device, or back; what was done is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        flat = [x for each in args for x in (each if isinstance(each, list | tuple) else [each])]
        places = {x.device.type for x in [*flat, found] if isinstance(x, torch.Tensor) and x.dim()}
        if len(places) > 1:
            self.moved.append(str(func))
        return found


@pytest.fixture
def nothing_runs(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled for a GPU is not run."""
    from attnspec.backends.triton import attention
    from attnspec.backends.triton.sums import way

    for launching in (attention, way):
        monkeypatch.setattr(launching, "_launch", lambda *given: lambda *arguments: None)

    def uncompiled(kind: flex.Kind) -> Any:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Any:
            # torch does not ask whether what it is told of lengths is so
            assert "IS_DIVISIBLE" in kind.options
            assert q.shape[2] % 128 == k.shape[2] % 128 == 0
            # something that depends on all three
            out = q[..., :1] * v.sum() * k.sum() * v.new_ones(v.shape[-1])
            return out, out.sum(-1).float() if kind.lse else None

        return run

    monkeypatch.setattr(flex, "_compiled", uncompiled)


def static_specs(part: int, parts: int) -> Iterator[tuple[Spec, int]]:
    """The specs of the zoo whose pairs no tensor decides, with a length, in parts."""
    for path, name in ATTENTIONS[part::parts]:
        spec = smaller(path, name)
        if not spec.program.inputs and not decided_leaves(spec.program):
            yield spec, spec.program.fixed_length or 96


def waits(call: Callable[[Any], torch.Tensor], parts: Sequence[torch.Tensor]) -> list[str]:
    """What moves in the second call and its backward: the first one lays out."""
    moved: list[str] = []
    for _ in range(2):
        with Unmoved() as mode:
            torch.autograd.grad(call(parts).sum(), parts, allow_unused=True)
        moved = mode.moved
    return moved


PARTS = [0, *(pytest.param(x, marks=pytest.mark.slow) for x in range(1, 24))]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("part", PARTS)
def test_kernels_of_static_graphs(part: int) -> None:
    seen = set()
    for spec, n in static_specs(part, len(PARTS)):
        for work, heads in works_of(spec.program, 0, spec.program.heads or 2, n, n, {}):
            if work.mechanism is not None:
                continue
            for backend in BACKENDS:
                # what runs few queries lays out for each call
                if backend.name == "rows" or refusal_of(backend, work, "cuda") is not None:
                    continue
                seen.add(backend.name)
                kernel: Any = backend.build(work, heads, ELSEWHERE)
                moved = waits(lambda x: kernel(*x, call_of(work, heads)), tensors(len(heads), n))  # noqa: B023
                assert not moved, f"{spec.name}, {backend.name}"
    assert {"torch", "tiles", "scattered", "flex", "triton"} <= seen


LABELLED = "causal input x: ids attend same(x)"

READ = (
    ("triton", LABELLED),
    ("triton", "input x: numbers attend where(abs(x(q) - x(k)) <= 0.3) | self"),
    ("triton", "causal input x: tokens attend window(radius = 40) | global(x)"),
    ("triton", "causal input x: ids attend (window(radius = 40) & same(x)) + linear()"),
    ("triton", "input x: length attend (window(radius = 9) | prefix(x)) + favor(features = 16)"),
    ("flex", LABELLED),
    ("flex", "input x: tokens attend window(radius = 9) | global(x)"),
    ("flex", "input x: length attend causal | prefix(x)"),
    ("flex", "causal input x: numbers attend where(0 <= x(q) - x(k) <= max(2, x(k) / 3))"),
)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("backend", "body"), READ)
def test_inputs_stay_where_they_are(backend: str, body: str) -> None:
    program = parse(f"attention sample {{ {body} }}").program
    ((work, heads),) = works_of(program, 0, 2, 300, 300, stand_ins(program))
    kernel: Any = backend_of(backend).build(work, heads, ELSEWHERE)
    kind = {"tokens": torch.bool, "numbers": torch.float64}.get(program.inputs[0].kind, torch.int64)
    shape = (2, 1, 1) if program.inputs[0].kind == "length" else (2, 300)
    given = torch.zeros(shape, dtype=kind, device=ELSEWHERE)
    call = replace(call_of(work, heads), dropout_p=0.0, data={"x": given})
    assert not waits(lambda x: kernel(*x, call), tensors(2, 300))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("causal", ["causal ", ""])
def test_a_graph_beside_a_mechanism(causal: str) -> None:
    body = f"{causal}attend window(before = 9, after = 0) + favor(features = 16)"
    program = parse(f"attention sample {{ {body} }}").program
    ((work, heads),) = works_of(program, 0, 2, 300, 300, {})
    kernel: Any = backend_of("triton").build(work, heads, ELSEWHERE)
    call = replace(call_of(work, heads), dropout_p=0.0)
    assert not waits(lambda x: kernel(*x, call), tensors(2, 300))


def call_of(work: Work, heads: tuple[int, ...]) -> Call:
    """Padding, dropped weights and all that is learned."""
    tables = {
        change.table: torch.zeros(len(heads), change.buckets, device=ELSEWHERE)
        for change in work.changes
        if isinstance(change, Bias)
    }
    padding = torch.ones(2, work.n_k, dtype=torch.bool, device=ELSEWHERE)
    return Call(padding, dropout_p=0.1, tables=tables)


def tensors(heads: int, n: int) -> list[torch.Tensor]:
    return [torch.empty(2, heads, n, 16, device=ELSEWHERE).requires_grad_() for _ in range(3)]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("part", PARTS)
def test_modules_of_static_specs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms among them, all that a GPU would choose."""
    monkeypatch.setattr(engine, "choose", lambda work, device, name: choose(work, "cuda", name))
    monkeypatch.setattr(module, "_is_looked_at", lambda *given: False)
    for spec, n in static_specs(part, len(PARTS)):
        attention = spec.compile(head_size=16).to(ELSEWHERE)
        heads = spec.program.heads or 2
        for key_heads in {1, heads}:
            parts = [
                x[:, : heads if i == 0 else key_heads] for i, x in enumerate(tensors(heads, n))
            ]
            assert not waits(lambda x: attention(*x), parts), spec.name  # noqa: B023


def test_what_waits_is_seen() -> None:
    x = torch.ones(3, device=ELSEWHERE, requires_grad=True)
    assert waits(lambda parts: parts[0] + torch.ones(3).to(ELSEWHERE), [x]) == [
        "aten._to_copy.default"
    ]
    with pytest.raises(RuntimeError, match="meta tensors"):
        waits(lambda parts: parts[0] * parts[0].sum().item(), [x])
    with pytest.raises(NotImplementedError):
        waits(lambda parts: parts[0][parts[0] > 0], [x])

"""A call of a static graph never waits for the device: on tensors that hold no numbers, forward and
backward, nothing asks for one, and nothing is moved to the device or from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from interpreted import interpreted
from population import population, spec_of
from sweeps import few
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode
from views import KERNELS, taken

from attnspec.backends.flex import attention as flex
from attnspec.backends.planner import backend_of
from attnspec.lower.lower import Binder
from attnspec.lower.work import Call

__all__ = ["interpreted"]

ELSEWHERE = torch.device("meta")
"""A device whose tensors have shapes alone: who asks for a number of theirs fails."""


class Unmoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what goes from the host to the device, or back."""

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
        places = {x.device.type for x in [*flat, found] if isinstance(x, Tensor) and x.dim()}
        if len(places) > 1:
            self.moved.append(str(func))
        return found


def waits(call: Callable[..., Tensor], parts: Sequence[Tensor]) -> list[str]:
    """What moves in the second call and its backward: the first one lays out."""
    moved: list[str] = []
    for _ in range(2):
        with Unmoved() as mode:
            torch.autograd.grad(call(*parts).sum(), parts, allow_unused=True)
        moved = mode.moved
    return moved


def tensors(heads: int, n: int) -> list[Tensor]:
    return [torch.empty(2, heads, n, 16, device=ELSEWHERE).requires_grad_() for _ in range(3)]


STATIC = [name for name, spec in population().items() if not spec.inputs]


@pytest.mark.parametrize("name", few(STATIC, 12))
def test_modules_of_static_specs(name: str) -> None:
    spec = population()[name]
    n = spec.program.fixed_length or 96
    for kernel in KERNELS:

        def ask(kernel: str = kernel) -> list[str]:
            module = spec.compile(kernel, head_size=16).to(ELSEWHERE)
            return waits(module, tensors(spec.heads or 2, n))

        assert not taken(kernel, ask), kernel


@pytest.fixture
def nothing_runs(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled for a GPU is not run."""
    from attnspec.backends.triton import attention

    monkeypatch.setattr(attention, "launch", lambda *given: None)

    def uncompiled(kind: flex.Kind) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
            # torch does not ask whether what it is told of lengths is so
            assert "IS_DIVISIBLE" in flex.options_of(kind)
            assert q.shape[2] % 128 == k.shape[2] % 128 == 0
            if not kind.small:
                raise TorchDynamoException("out of resource: shared memory")
            # something that depends on all three
            out = q[..., :1] * v.sum() * k.sum() * v.new_ones(v.shape[-1])
            return out, out.sum(-1).float() if kind.lse else None

        return run

    monkeypatch.setattr(flex, "_compiled", uncompiled)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("backend", ["triton", "flex"])
@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 9, after = 0) | columns(first(2))",
        "attend random(keys = 3, per_head = false)",
        "attend residue(step = 3) score alibi() normalize softmax1",
        "causal input x: ids attend same(x)",
        "input x: numbers attend where(abs(x(q) - x(k)) <= 0.3) | self",
        "causal input x: tokens attend window(radius = 40) | global(x)",
        "input x: length attend causal | prefix(x)",
    ],
)
def test_kernels_of_gpus(body: str, backend: str) -> None:
    program = spec_of(body).program
    ((work, heads),) = Binder(program).works(0, 2, 300, 300)
    kernel: Any = backend_of(backend).build(work, heads, ELSEWHERE)
    data = {}
    for entry in program.inputs:
        kind = {"tokens": torch.bool, "numbers": torch.float64}.get(entry.kind, torch.int64)
        shape = (2, 1, 1) if entry.kind == "length" else (2, 300)
        data["x"] = torch.zeros(shape, dtype=kind, device=ELSEWHERE)
    call = Call(torch.ones(2, 300, dtype=torch.bool, device=ELSEWHERE), data=data)
    assert not waits(lambda *x: kernel(*x, call), tensors(2, 300))


def test_the_detector_reports_a_wait_for_the_device() -> None:
    x = torch.ones(3, device=ELSEWHERE, requires_grad=True)
    assert waits(lambda x: x + torch.ones(3).to(ELSEWHERE), [x]) == ["aten._to_copy.default"]
    with pytest.raises(RuntimeError, match="meta tensors"):
        waits(lambda x: x * x.sum().item(), [x])

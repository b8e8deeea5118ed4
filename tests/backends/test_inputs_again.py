"""Masks and tables made of inputs: kept while the same come again; what they leave is priced in the
call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import tensors
from population import spec_of
from torch import Tensor

from attnspec.backends.common.remembered import Remembered, table_of


class Counted:
    """How often something was built."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


def test_values_are_kept_while_the_same_numbers_come() -> None:
    kept, build, labels = Remembered[int](), Counted(), torch.arange(6)
    assert [kept.get([x], build) for x in (labels, labels, labels.clone())] == [1, 1, 1]
    # NumPy counts no writes
    labels.numpy()[2] = 9
    assert kept.get([labels], build) == 2
    # nor does inference
    with torch.inference_mode():
        assert kept.get([labels.clone()], build) == 2
        labels.add_(1)
    assert kept.get([labels], build) == 3
    same_bytes = labels.view(torch.float64), labels.view(2, 3), labels.view(torch.uint8)
    assert [kept.get([x], build) for x in same_bytes] == [4, 5, 6]
    assert kept.get([labels], build, "another setting") == 7


def test_so_many_values_are_kept() -> None:
    kept, build = Remembered[int](2), Counted()
    order = [torch.tensor([x]) for x in (0, 1, 0, 1, 2, 1, 0)]
    assert [kept.get([x], build) for x in order] == [1, 2, 1, 2, 3, 2, 4]
    # numbers on a device keep their type
    each = [table_of(x, torch.device("meta")).dtype for x in ((1.0,), (1,))]
    assert each == [torch.float32, torch.int64]


def test_nothing_is_kept_where_numbers_are_not_known() -> None:
    kept, build, x = Remembered[int](), Counted(), torch.arange(4.0)

    def look(x: Tensor) -> Tensor:
        kept.get([x], build)
        return x * 2

    for run in (torch.func.vmap(look), torch.func.grad(lambda x: look(x).sum())):
        for _ in range(2):
            run(x)
    assert build.times == 4
    with torch.device("meta"):
        made = torch.empty(3)
    versions = [kept.get([made], build), kept.get([made], build), kept.get([made.zero_()], build)]
    assert versions == [5, 5, 6]
    assert len(kept.kept) == 1
    # a tensor that is gone takes what was made of it along
    del made
    assert not kept.kept


PACKED = "causal input x: ids attend same(x)"


def test_samples_are_laid_out_where_their_inputs_leave_little() -> None:
    n = 600
    module, labels = (
        spec_of("input x: ids attend same(x)").compile(),
        (torch.arange(2 * n) // 32).view(2, n),
    )
    labels[1] = 0
    given = tensors(2, 4, n, n, dtype=torch.float32)
    calls = [module(*given, inputs={"x": labels.clone()}) for _ in range(3)]
    # what runs is the same in every call: a checkpoint computes what was computed
    assert all(torch.equal(x, calls[0]) for x in calls)
    groups = [group for each in module.engine.prepared.kept.values() for group in each.groups]
    kernels: list[Any] = [group.kernel for group in groups]
    kept = [type(each).__name__ for x in kernels for each, _ in x._kernels.kept.values()]
    assert kept == ["SteppedKernel", "NoneType"]


@pytest.mark.parametrize("body", [PACKED, "input c: choices(size = 32) attend chosen(c)"])
def test_masks_of_inputs_are_those_of_the_call(body: str) -> None:
    spec = spec_of(body)
    module, n = spec.compile("torch"), 96
    given = tensors(2, 2, n, n, dtype=torch.float64)
    real = torch.rand(2, n) < 0.8
    for _ in range(4):
        inputs = {"x": torch.randint(0, 5, (2, n)), "c": torch.randint(-1, 3, (2, 2, n, 1))}
        own: Any = {name: inputs[name] for name in spec.inputs}
        for padding in (None, real, real, ~real, None):
            asked: Any = {"inputs": own, "key_padding_mask": padding}
            found, meant = (x(*given, **asked) for x in (module, spec.compile("dense")))
            torch.testing.assert_close(found, meant, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("blocks", [1, 14])
def test_long_lists_of_inputs_are_computed_with_all_pairs(blocks: int) -> None:
    spec, n = spec_of("input c: choices(size = 64) attend chosen(c)"), 1024
    module = spec.compile()
    given = tensors(1, 4, n, n, size=8, dtype=torch.float32)
    rows = torch.stack([torch.randperm(16)[:blocks] for _ in range(n)])[None, None]
    out = module(*given, inputs={"c": rows})
    torch.testing.assert_close(out, spec.compile("dense")(*given, inputs={"c": rows}))
    kernel: Any = next(iter(module.engine.prepared.kept.values())).groups[0].kernel
    assert ("definition" in vars(kernel)) == (blocks > 1)

"""How many calls into torch a call of a module is: few and large ones, as busy machines need."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from zoo import IDS, every_attention, sample, smaller

from attnspec.ir.program import Program

MOST = 12
"""Calls for each step and piece that is computed."""

INPUTS = 24
"""Calls that evaluate the predicates of run-time inputs and make a mask of them."""

VIEWS = {
    "aten::" + name
    for name in (
        *("alias", "as_strided", "contiguous", "detach", "empty", "empty_like", "empty_strided"),
        *("expand", "flatten", "movedim", "narrow", "new_empty", "permute", "promote_types"),
        *("reshape", "select", "slice", "split", "squeeze", "t", "to", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "values", "view", "view_as", "zeros"),
    )
}
"""What computes nothing."""

MORE = {
    "local_2d": "rows of 20 and more widths, a softmax for each and head",
    "bigbird_etc": "rows of five widths, a softmax for each and head",
    "sliding_tile_2d": "boxes of a grid are put in order axis by axis",
}
"""Specs that take more, and why."""

PRODUCTS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::sparse_sampled_addmm",
    "aten::matmul",
)


def calls_of(spec, n: int) -> tuple[Counter[str], int]:  # type: ignore[no-untyped-def]
    """The calls of a forward, by name, and the steps of the plan."""
    heads = spec.program.heads or 4
    q, k, v = (torch.randn(1, heads, n, 16) for _ in range(3))
    given = {name: torch.as_tensor(value)[None] for name, value in sample(spec, n).items()}
    module = spec.compile()
    with torch.no_grad():
        module(q, k, v, inputs=given or None)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            module(q, k, v, inputs=given or None)
    found = Counter(
        event.name
        for event in seen.events() or ()
        if event.cpu_parent is None and event.name.startswith("aten::") and event.name not in VIEWS
    )
    steps = [step for step in spec.plan(n, "cpu", 1, heads).steps if 0 in step.layers]
    return found, sum(len(step.lines) or 1 for step in steps)


def is_graph(program: Program) -> bool:
    """Whether a program weighs by softmax what it knows before tensors come."""
    decided = any(entry.kind in ("choices", "scores", "buckets") for entry in program.inputs)
    return not decided and not any(attend.mechanism for attend in program.attends)


def _checked(path: Path, name: str, n: int) -> None:
    spec = smaller(path, name)
    if not is_graph(spec.program) or spec.stack().unknown is not None:
        pytest.skip("a mechanism, or decided by tensors")
    if path.stem in MORE:
        pytest.skip(MORE[path.stem])
    n = spec.program.fixed_length or n
    found, steps = calls_of(spec, n)
    pieces = max(steps, sum(found[product] for product in PRODUCTS))
    total, allowed = sum(found.values()), MOST * pieces + INPUTS * bool(spec.inputs)
    told = f"{path.stem}:{name} at n = {n}: {total} calls, {steps} steps, {pieces} pieces: {found}"
    print(told)
    assert total <= allowed, told
    if n <= 256 and path.stem != "gemma2":
        # whose changed scores are computed head by head
        assert total <= MOST * steps + INPUTS * bool(spec.inputs), told


@every_attention
def test_a_short_call_is_a_handful_of_calls(path: Path, name: str) -> None:
    _checked(path, name, 128)


@pytest.mark.slow
@every_attention
def test_a_long_call_is_a_handful_for_each_piece(path: Path, name: str) -> None:
    _checked(path, name, 4096)


def test_there_are_specs_to_count() -> None:
    assert len(IDS) > 100

"""A causal attention that goes on from a state: in place, from other samples, with sums, refused.

That the rows of steps are those of one call, for every spec, is a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from attention_checks import learner_of
from torch import Tensor

from attnspec.runtime import CompiledAttention

WINDOW = "causal attend window(before = 7, after = 0)"
BIASED = (
    "causal heads 2 attend window(before = 3, after = 0) score bias(buckets = 8)"
    " head 1 { attend window(radius = 5) }"
)
HYBRID = "causal attend (window(before = 9, after = 0) | columns(first(2))) + favor(features = 8)"
MARKED = "causal input y: tokens(at_most = 12) attend window(before = 2, after = 0) | columns(y)"
LABELLED = (
    "causal input x: ids input y: tokens(at_most = 12)"
    " attend (window(before = 2, after = 0) | columns(y)) & same(x)"
)

Given: TypeAlias = tuple[Tensor, Tensor, Tensor]


def tensors(n: int) -> Given:
    source = torch.Generator().manual_seed(n)
    shapes = ((2, n, 8), (2, n, 8), (2, n, 4))
    q, k, v = (torch.randn(3, *s, generator=source, dtype=torch.float64) for s in shapes)
    return q, k, v


def part_of(parts: Sequence[Tensor], low: int, high: int) -> Given:
    q, k, v = (x[:, :, low:high] for x in parts)
    return q, k, v


def inputs_of(module: CompiledAttention, n: int) -> dict[str, Tensor]:
    """Runs of documents, not in order, and twelve marked tokens, others in every sample."""
    source = torch.Generator().manual_seed(n)
    documents = torch.randint(0, 4, (3, n // 9 + 1), generator=source).repeat_interleave(9, 1)
    marked = torch.rand(3, n, generator=source).argsort(1) < 12
    every = {"x": documents[:, :n], "y": marked}
    return {entry.name: every[entry.name] for entry in module.program.inputs}


def real_keys(n: int) -> Tensor:
    """Padding in front, in the middle and at the end of samples."""
    padding = torch.ones(3, n, dtype=torch.bool)
    padding[0, : n // 5] = False
    padding[1, n // 2 : n // 2 + n // 8] = False
    padding[2, -n // 4 :] = False
    return padding


def in_steps(
    module: CompiledAttention,
    parts: Sequence[Tensor],
    sizes: Iterable[int],
    inputs: Mapping[str, Tensor] | None = None,
    padding: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """What all steps return together, and the last state."""
    state, outs, low = None, [], 0
    for size in sizes:
        at = slice(low, low + size)
        rest: dict[str, Any] = {
            "inputs": None if inputs is None else {x: y[:, at] for x, y in inputs.items()}
        }
        rest["key_padding_mask"] = None if padding is None else padding[:, at]
        q, k, v = part_of(parts, low, low + size)
        out, state = module.step(q, k, v, state, **rest, **options)
        outs.append(out)
        low += size
    if isinstance(outs[0], tuple):
        return [torch.cat(each, 2) for each in zip(*outs, strict=True)], state
    return torch.cat(outs, 2), state


def close(found: Any, meant: Any) -> None:
    torch.testing.assert_close(found, meant, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("body", [BIASED, HYBRID, LABELLED, "causal attend residue(step = 3)"])
def test_steps_in_place_equal_one_call(body: str, padded: bool) -> None:
    """By single positions before and after a long part, of padding anywhere; with log-sum-exps."""
    module, parts, padding = learner_of(body), tensors(50), real_keys(50) if padded else None
    inputs, given = inputs_of(module, 50), {"key_padding_mask": padding, "return_lse": True}
    sizes = [0, 11, *[1] * 20, 7, *[1] * 12, 0]
    options = {"in_place": True, "keep_all": "residue" in body, "return_lse": True}
    with torch.no_grad():
        meant = module(*parts, inputs=inputs, **given)
        found, state = in_steps(module, parts, sizes, inputs, padding, **options)
    close(found, list(meant))
    assert state.position == 50
    assert str(state).startswith("StreamState(position=50, of ")


def test_padding_may_begin_and_end_with_any_step() -> None:
    module, parts, padding = learner_of(WINDOW), tensors(20), torch.ones(3, 20, dtype=torch.bool)
    padding[:, 8:12] = False
    meant = module(*parts, key_padding_mask=padding)
    first, state = module.step(*part_of(parts, 0, 8))
    second, state = module.step(*part_of(parts, 8, 14), state, key_padding_mask=padding[:, 8:14])
    third, _ = module.step(*part_of(parts, 14, 20), state)
    close(torch.cat([first, second, third], 2), meant)


@pytest.mark.parametrize("body", [f"{WINDOW} | columns(first(3))", LABELLED])
def test_derivatives_of_steps_are_those_of_a_call(body: str) -> None:
    module, parts = learner_of(body), [x.requires_grad_() for x in tensors(40)]
    inputs, grads = inputs_of(module, 40), []
    for out in (in_steps(module, parts, [21, 1, 18], inputs)[0], module(*parts, inputs=inputs)):
        (once,) = torch.autograd.grad(out.square().sum(), parts[:1], create_graph=True)
        grads.append([once.detach(), *torch.autograd.grad(once.square().sum(), parts)])
    close(*grads)


@pytest.mark.parametrize("body", ["linear()", "window(radius = 4) | global(first(3))"])
def test_a_state_does_not_grow(body: str) -> None:
    module, counts = learner_of(f"causal attend {body}"), []
    for sizes in ([20], [20, 30], [20, *[1] * 60]):
        _, state = in_steps(module, tensors(80), sizes)
        counts.append(sum(x.numel() for x in state.owned().kept()))
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.parametrize("body", [BIASED, HYBRID, MARKED, "causal attend topk(keys = 4)"])
def test_a_state_of_other_samples_goes_on_as_theirs(body: str) -> None:
    module, parts = learner_of(body), tensors(30)
    inputs, order = inputs_of(module, 30), torch.tensor([2, 0, 0, 1, 2])
    meant = module(*parts, inputs=inputs)[order, :, 20:]
    early, late = ({x: y[:, at] for x, y in inputs.items()} for at in (slice(20), slice(20, 30)))
    _, state = module.step(*part_of(parts, 0, 20), inputs=early)
    chosen = state.selected(order).owned()
    assert chosen.samples == 5
    q, k, v = (x[order] for x in part_of(parts, 20, 30))
    found, _ = module.step(q, k, v, chosen, inputs={x: y[order] for x, y in late.items()})
    close(found, meant)
    # the state that was there goes on as before
    again, _ = module.step(*part_of(parts, 20, 30), state, inputs=late)
    close(again[order], meant)


def test_a_state_with_memory_of_its_own_holds_no_more() -> None:
    module = learner_of(
        "causal heads 2 attend window(before = 3, after = 0) head 1 { attend self }"
    )
    _, state = module.step(*tensors(2))
    assert any(x.untyped_storage().nbytes() > x.nbytes for x in state.kept())
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.owned().kept())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_in_place_copies_nothing_of_a_full_window(in_place: bool) -> None:
    module = learner_of("causal attend window(before = 63, after = 0) | columns(first(4))").float()
    parts, states, places = (torch.randn(1, 2, 140, 8),) * 3, [], set()
    with torch.no_grad():
        _, state = module.step(*part_of(parts, 0, 90))
        for low in range(90, 140):
            _, state = module.step(*part_of(parts, low, low + 1), state, in_place=in_place)
            # memory of a state that is there is not another's
            states.append(state)
            places.add(frozenset(x.untyped_storage().data_ptr() for x in state.kept()))
    assert len(places) == (1 if in_place else len(states))


def test_a_state_that_is_not_given_up_stays() -> None:
    module, parts = learner_of("causal attend window(before = 5, after = 0)"), tensors(40)
    meant = module(*parts)
    with torch.no_grad():
        _, state = in_steps(module, parts, [30, 1], in_place=True)
        other, _later = module.step(*part_of(parts, 7, 8), state)
        found, _ = module.step(*part_of(parts, 31, 40), state)
    close(found, meant[:, :, 31:])
    assert not torch.allclose(other, meant[:, :, 31:32])
    # what is differentiated is not written over
    q, k, v = (x.clone().requires_grad_() for x in part_of(parts, 31, 32))
    out, after = module.step(q, k, v, state, in_place=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.requires_grad or x.dtype == torch.bool for x in after.kept())


@pytest.mark.parametrize("start", [0, 20, 39])
def test_inference_mode_may_begin_and_end_with_any_step(start: int) -> None:
    module, n = learner_of(f"{WINDOW} & residue(step = 2)"), 40
    parts, real = tensors(n), torch.ones(3, 1, dtype=torch.bool)
    leaf = parts[0].clone().requires_grad_()
    outs, state = [], None
    for low in range(n):
        inside = low == start or low < start // 2
        with torch.inference_mode(inside):
            part = part_of(parts if inside else (leaf, *parts[1:]), low, low + 1)
            mask = real if low >= start else None
            out, state = module.step(*part, state, key_padding_mask=mask, in_place=True)
        outs.append(out)
    close(torch.cat(outs, 2), module(*parts))
    if start < 39:
        assert torch.autograd.grad(outs[-1].sum(), leaf)[0][:, :, -1].any()


def test_keys_that_are_learned_are_not_written_over_by_others() -> None:
    module, learned, (q, k, v) = learner_of(WINDOW), 8, tensors(12)
    prefix = k[:, :, :learned].clone().requires_grad_()
    (meant,) = torch.autograd.grad(
        module(q, torch.cat([prefix, k[:, :, learned:]], 2), v).square().sum(), prefix
    )
    outs, state = [], None
    for low in range(12):
        part = part_of((q, prefix if low < learned else k, v), low, low + 1)
        out, state = module.step(*part, state, in_place=True)
        outs.append(out)
    close(torch.autograd.grad(torch.cat(outs, 2).square().sum(), prefix)[0], meant)

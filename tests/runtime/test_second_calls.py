"""Calls like an earlier one: what is kept of the first is right for the second."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from attention_checks import module_of, tensors
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from attnspec.runtime import CompiledAttention, composed

BODIES = (
    "attend full",
    "causal attend full",
    "attend window(radius = 9)",
    "heads 4 attend window(radius = 9) | random(keys = 2)",
)


def padded(batch: int, n: int) -> torch.Tensor:
    return torch.arange(n) < n - 3 * torch.arange(batch)[:, None]


LABELLED = "input documents : ids input marks : tokens"

MORE = (
    f"{LABELLED} attend window(radius = 9) & same(documents) | global(marks)",
    f"{LABELLED} causal attend same(documents) & ~global(marks) score alibi()",
    "attend window(radius = 9) score bias(buckets = 8, max_distance = 16)",
)
"""Bodies with inputs, or with what is learned."""


def inputs_of(body: str, seed: int = 0) -> dict[str, torch.Tensor] | None:
    if LABELLED not in body:
        return None
    generator = torch.Generator().manual_seed(seed)
    marks = torch.rand(2, 40, generator=generator) < 0.1
    return {"marks": marks, "documents": torch.randint(4, (2, 40), generator=generator)}


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("body", MORE)
def test_inputs_and_tables_of_a_second_call_are_its_own(body: str, with_padding: bool) -> None:
    module = module_of("heads 4 " + body, "torch" if LABELLED in body else "auto")
    definition = module_of("heads 4 " + body, "dense")
    for table in module.parameters():
        torch.nn.init.normal_(table)
    definition.load_state_dict(module.state_dict())
    given = tensors(2, 4, 40, 40)
    padding = padded(2, 40) if with_padding else None

    def called(module: CompiledAttention, seed: int) -> list[torch.Tensor]:
        inputs = inputs_of(body, seed)
        out = module(*given, key_padding_mask=padding, inputs=inputs)
        if inputs is not None:
            # what a call was given is its own
            inputs.clear()
        leaves = [*given, *module.parameters()]
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))]

    for seed in (0, 1):
        for x, meant in zip(called(module, seed), called(definition, seed), strict=True):
            torch.testing.assert_close(x, meant)


def test_inputs_that_are_written_over_are_missed() -> None:
    module = module_of(MORE[0])
    given, inputs = tensors(2, 4, 40, 40), inputs_of(LABELLED)
    assert inputs is not None
    module(*given, inputs=inputs)
    out = module(*given, inputs=inputs)
    inputs["documents"].zero_()
    with pytest.raises(RuntimeError, match="written over"):
        torch.autograd.grad(out.sum(), given)


def test_numbers_of_inputs_are_looked_at_in_every_call() -> None:
    module = module_of("input marks : tokens(at_most = 2) attend global(marks)")
    given, few = tensors(1, 2, 40, 40), torch.arange(40)[None] < 2
    for _ in range(2):
        module(*given, inputs={"marks": few})
    with pytest.raises(ValueError, match="promises at most 2"):
        module(*given, inputs={"marks": ~few})


@pytest.mark.parametrize("body", BODIES)
def test_the_same_padding_is_looked_at_once(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspec.backends.torch_call import kernel

    made: list[torch.Tensor] = []

    class Counted(kernel.Bias):
        def __init__(self, added: torch.Tensor, empty: torch.Tensor | None = None) -> None:
            made.append(added)
            super().__init__(added, empty)

    monkeypatch.setattr(kernel, "Bias", Counted)
    module = module_of(body)
    given = [x.requires_grad_() for x in tensors(2, 4, 40, 40)]
    # the layers of a model are called with one mask, and it may be made anew for each
    for _ in range(3):
        out = module(*given, key_padding_mask=padded(2, 40))
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert sum(len(added) == 2 for added in made) == 1


def test_padding_that_changes_in_place_is_seen() -> None:
    module, fresh = module_of("attend window(radius = 9)"), module_of("attend window(radius = 9)")
    given = tensors(2, 4, 40, 40)
    padding = padded(2, 40)
    behind = padding.numpy()
    first = module(*given, key_padding_mask=padding)
    version = padding._version
    # torch does not count what is written behind its back
    behind[:, 10:] = False
    assert padding._version == version
    found = module(*given, key_padding_mask=padding)
    assert not torch.equal(found, first)
    assert torch.equal(found, fresh(*given, key_padding_mask=padding.clone()))
    with torch.inference_mode():
        inside = padding.clone()
        torch.testing.assert_close(module(*given, key_padding_mask=inside), found)


@pytest.mark.limits("", "tiny")
def test_kept_paddings_let_their_kernels_go() -> None:
    module = module_of("attend random(keys = 3)", "torch")
    for real in (padded(2, 40), padded(2, 40).flip(1), torch.ones(2, 40, dtype=torch.bool)):
        module(*tensors(2, 4, 40, 40), key_padding_mask=real)
    (group,) = module.engine.prepare(0, 4, 4, 40, 40, "cpu").groups
    left = weakref.ref(group.kernel)
    del group, module
    gc.collect()
    assert left() is None


def test_who_looks_on_is_not_passed_by() -> None:
    module = module_of("attend full")
    q, k, v = (x.float() for x in tensors(2, 4, 40, 40))
    meant = functional.scaled_dot_product_attention(q, k, v)
    module(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(q, k, v).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counted:
        torch.testing.assert_close(module(q, k, v), meant)
    assert counted.get_total_flops() == 4 * 2 * 4 * 40 * 40 * q.shape[-1]
    by_one = torch.vmap(lambda *x: module(*(y[None] for y in x))[0])(q, k, v)
    torch.testing.assert_close(by_one, meant)
    with composed():
        torch.testing.assert_close(module(q, k, v), meant)
    assert not torch.equal(module(q, k, v, dropout_p=0.5), module(q, k, v, dropout_p=0.5))
    out, lse = module(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 40)
    torch.testing.assert_close(out, meant)

"""Calls like an earlier one: quick, and as strict and as right as the first."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from attention_checks import module_of, tensors
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from attnspec.runtime import CompiledAttention, composed

FORWARD, TRAINING = 60, 120
"""Functions of Python that a short call may enter: 96 and 176 when every call was checked anew."""

READING = 90
"""The same of a forward that reads inputs or a learned table: 111 to 193 when every such call was
checked anew."""

BODIES = (
    "attend full",
    "causal attend full",
    "attend window(radius = 9)",
    "heads 4 attend window(radius = 9) | random(keys = 2)",
)


def entered(call: Callable[[], object]) -> int:
    """How many functions of Python a call enters."""
    found = 0

    def look(frame: object, event: str, arg: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def padded(batch: int, n: int) -> torch.Tensor:
    return torch.arange(n) < n - 3 * torch.arange(batch)[:, None]


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_short_call_does_little_of_its_own(body: str, with_padding: bool) -> None:
    module = module_of(body)
    q, k, v = tensors(2, 4, 40, 40)
    padding = padded(2, 40) if with_padding else None

    def call() -> torch.Tensor:
        out: torch.Tensor = module(q, k, v, key_padding_mask=padding)
        return out

    with torch.no_grad():
        call()
        assert entered(call) <= FORWARD
    given = [x.requires_grad_() for x in (q, k, v)]
    upstream = torch.ones_like(q)

    def training() -> object:
        return torch.autograd.grad(call(), given, upstream)

    training()
    training()
    assert entered(training) <= TRAINING


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
def test_inputs_and_tables_are_no_detour(body: str, with_padding: bool) -> None:
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
    inputs = inputs_of(body)
    with torch.no_grad():
        found = entered(lambda: module(*given, key_padding_mask=padding, inputs=inputs))
    assert found <= READING


def test_inputs_that_are_written_over_are_missed() -> None:
    module = module_of(MORE[0])
    given, inputs = tensors(2, 4, 40, 40), inputs_of(LABELLED)
    assert inputs is not None
    module(*given, inputs=inputs)
    out = module(*given, inputs=inputs)
    inputs["documents"].zero_()
    with pytest.raises(RuntimeError, match="written over"):
        torch.autograd.grad(out.sum(), given)


WRONG_INPUTS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "none": lambda x: None,
    "one": lambda x: {"marks": x["marks"]},
    "another": lambda x: {**x, "more": x["marks"]},
    "another name": lambda x: {"marks": x["marks"], "document": x["documents"]},
    "type": lambda x: {**x, "marks": x["marks"].int()},
    "shape": lambda x: {**x, "marks": x["marks"][:, 1:]},
    "samples": lambda x: {**x, "marks": x["marks"][:1]},
    "no tensor": lambda x: {**x, "marks": None},
    "a list": lambda x: {**x, "marks": [True] * 40},
    "no mapping": lambda x: [*x.items()],
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_wrong_inputs_are_refused_after_right_ones_too(name: str) -> None:
    body, given, inputs = MORE[0], tensors(2, 4, 40, 40), inputs_of(LABELLED)
    assert inputs is not None
    module, wrong = module_of(body), WRONG_INPUTS[name](inputs)
    module(*given, inputs=inputs)
    with pytest.raises((TypeError, ValueError)) as found:
        module(*given, inputs=wrong)
    with pytest.raises((TypeError, ValueError)) as meant:
        module_of(body)(*given, inputs=wrong)
    assert (type(found.value), str(found.value)) == (type(meant.value), str(meant.value))


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


@pytest.mark.parametrize("small", [True, False])
def test_kept_paddings_let_their_kernels_go(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspec.backends.torch_call import kernel

    monkeypatch.setattr(kernel, "SMALL", 1 << 20 if small else 0)
    module = module_of("attend random(keys = 3)", "torch")
    for real in (padded(2, 40), padded(2, 40).flip(1), torch.ones(2, 40, dtype=torch.bool)):
        module(*tensors(2, 4, 40, 40), key_padding_mask=real)
    (group,) = module.engine.prepare(0, 4, 4, 40, 40, "cpu").groups
    left = weakref.ref(group.kernel)
    del group, module
    gc.collect()
    assert left() is None


WRONG: dict[str, Callable[[CompiledAttention, list[torch.Tensor]], object]] = {
    "layer": lambda m, x: m(*x, layer=True),
    "no such layer": lambda m, x: m(*x, layer=2),
    "half a layer": lambda m, x: m(*x, layer=0.0),
    "dropout": lambda m, x: m(*x, dropout_p=False),
    "negative dropout": lambda m, x: m(*x, dropout_p=-1.0),
    "first query": lambda m, x: m(*x, query_start=False),
    "a later query": lambda m, x: m(*x, query_start=1),
    "type": lambda m, x: m(x[0], x[1].float(), x[2]),
    "heads": lambda m, x: m(x[0], x[1][:, :3], x[2][:, :3]),
    "axes": lambda m, x: m(*(y[0] for y in x)),
    "layout": lambda m, x: m(x[0].to_sparse(), x[1], x[2]),
    "nested": lambda m, x: m(
        torch.nested.nested_tensor(list(x[0]), layout=torch.jagged), x[1], x[2]
    ),
    "no tensor": lambda m, x: m(x[0].tolist(), x[1], x[2]),
    "padding's type": lambda m, x: m(*x, key_padding_mask=padded(2, 40).int()),
    "padding's shape": lambda m, x: m(*x, key_padding_mask=padded(2, 39)),
    "padding": lambda m, x: m(*x, key_padding_mask=[True]),
    "inputs": lambda m, x: m(*x, inputs={"x": x[0]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_after_a_right_call_too(name: str) -> None:
    body = "layers 2 attend window(radius = 9)"
    given = list(tensors(2, 4, 40, 40))
    module, wrong = module_of(body), WRONG[name]
    module(*given)
    module(*given, key_padding_mask=padded(2, 40), layer=1)
    with pytest.raises((TypeError, ValueError)) as found:
        wrong(module, given)
    with pytest.raises((TypeError, ValueError)) as meant:
        wrong(module_of(body), given)
    assert (type(found.value), str(found.value)) == (type(meant.value), str(meant.value))


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

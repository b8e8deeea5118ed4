"""A causal attention that goes on from a state: the rows of one call, however it is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from attention_checks import spec_of
from kernel_texts import CASES
from torch.utils._python_dispatch import TorchDispatchMode

from attnspec.backends.common.kv_keeper import Keeper, Kept, Seen
from attnspec.limits import LIMITS
from attnspec.runtime import CompiledAttention
from attnspec.runtime.streaming import StreamState

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
    "causal attend shift(columns(first(2)), by = 3) | window(before = 2, after = 0)",
    "causal attend shift(rows(positions(30)) | self, by = 11) & window(before = 60, after = 0)",
    "causal heads 2 attend window(before = 3, after = 0) score bias(buckets = 8)"
    " head 1 { attend window(radius = 5) }",
    "causal heads 2 attend window(before = 3, after = 0) head 1 { attend linear() }",
    "causal attend window(before = 9, after = 0) + linear(feature = exp)",
    "causal attend (window(before = 9, after = 0) | columns(first(2))) + favor(features = 8)",
    "causal attend where(q - k in {0, 1, 5} or k < 2)",
    "causal attend window(radius = 3) + taylor() score softcap(cap = 2) score alibi()",
    "causal attend window(before = 20, after = 0) & (self | random(keys = 9))",
    "causal attend block(size = 8, before = 2) & (self | random_blocks(size = 4, blocks = 2))",
]


INPUTS = [
    "causal input x: ids attend window(before = 7, after = 0) & same(x)",
    "causal input x: ids attend window(radius = 9) - same(x) score alibi() normalize softmax1",
    "causal input x: ids attend shift(same(x), by = 4) & window(before = 5, after = 0)",
    "causal input x: ids attend window(before = 6, after = 0) & transpose(shift(same(x), by = 3))",
    "causal input y: tokens(at_most = 12) attend window(before = 2, after = 0) | columns(y)",
    "causal input y: tokens attend window(before = 9, after = 0) & (columns(y) | rows(y))",
    "causal input y: tokens(at_most = 12) attend block(size = 4)"
    " | columns((y | first(2)) - every(3))",
    "causal input x: ids input y: tokens(at_most = 12)"
    " attend (window(before = 2, after = 0) | columns(y)) & same(x)",
    "causal heads 2 input x: ids attend window(before = 3, after = 0)"
    " head 1 { attend window(before = 5, after = 0) & same(x) }",
    "causal input x: ids attend (window(before = 5, after = 0) & same(x)) + favor(features = 8)",
    "causal input y: tokens(at_most = 12) attend columns(y) + linear()",
    "causal input y: tokens(at_most = 12) attend (window(before = 3, after = 0) | columns(y))"
    " & (block(size = 16) | columns(y))",
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
    module: CompiledAttention,
    given: Given,
    sizes: Sequence[int],
    padding: torch.Tensor | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, StreamState | None]:
    state: StreamState | None = None
    outs, at = [], 0
    for size in sizes:
        here = slice(at, at + size)
        out, state = module.step(
            *part_of(given, at, at + size),
            state,
            key_padding_mask=None if padding is None else padding[:, here],
            inputs=None if inputs is None else {x: y[:, here] for x, y in inputs.items()},
        )
        outs.append(out)
        at += size
    return torch.cat(outs, 2), state


def inputs_of(module: CompiledAttention, n: int) -> dict[str, torch.Tensor]:
    """Runs of documents, not in order, and twelve marked tokens, others in every sample."""
    source = torch.Generator().manual_seed(n)
    documents = torch.randint(0, 4, (3, n // 9 + 1), generator=source).repeat_interleave(9, 1)
    marked = torch.rand(3, n, generator=source).argsort(1) < 12
    every = {"x": documents[:, :n], "y": marked}
    return {entry.name: every[entry.name] for entry in module.program.inputs}


def real_keys(n: int) -> torch.Tensor:
    """Padding in front, in the middle and at the end of samples."""
    padding = torch.ones(3, n, dtype=torch.bool)
    padding[0, : n // 5] = False
    padding[1, n // 2 : n // 2 + n // 8] = False
    padding[2, -n // 4 :] = False
    return padding


def test_padding_may_begin_and_end_with_any_step() -> None:
    module, given, padding = module_of(GRAPHS[0]), tensors(20), torch.ones(3, 20, dtype=torch.bool)
    padding[:, 8:12] = False
    meant = module(*given, key_padding_mask=padding)
    first, state = module.step(*part_of(given, 0, 8))
    second, state = module.step(*part_of(given, 8, 14), state, key_padding_mask=padding[:, 8:14])
    third, _ = module.step(*part_of(given, 14, 20), state)
    torch.testing.assert_close(torch.cat([first, second, third], 2), meant)


def test_inputs_of_a_step_are_differentiated_through() -> None:
    module, given = module_of(INPUTS[7]), tensors(30)
    inputs = inputs_of(module, 30)
    for part in given:
        part.requires_grad_()
    meant = torch.autograd.grad(module(*given, inputs=inputs).square().sum(), given)
    out, _ = in_steps(module, given, [11, 1, 18], None, inputs)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), meant)


def test_inputs_of_a_step_are_checked() -> None:
    module, given = module_of(INPUTS[7]), tensors(8)
    inputs = inputs_of(module, 8)
    with pytest.raises(ValueError, match="needs its input `x`"):
        module.step(*given)
    with pytest.raises(
        ValueError, match=r"the input `x` must have the shape \[3, 8\], got \[3, 7\]"
    ):
        module.step(*given, inputs={"x": inputs["x"][:, :7], "y": inputs["y"]})
    with pytest.raises(ValueError, match=r"key_padding_mask must have the shape \[3, 8\]"):
        module.step(*given, inputs=inputs, key_padding_mask=torch.ones(3, 9, dtype=torch.bool))
    # eight here and eight there are more than twelve, as in one call
    many = {"x": inputs["x"], "y": torch.ones(3, 8, dtype=torch.bool)}
    _, state = module.step(*given, inputs=many)
    with pytest.raises(ValueError, match="`y` promises at most 12 tokens, got 16"):
        module.step(*given, state, inputs=many)


def test_marked_keys_alone_are_kept_beside_the_latest() -> None:
    module, given = module_of(INPUTS[4]), tensors(60)
    inputs = {"y": torch.zeros(3, 60, dtype=torch.bool)}
    inputs["y"][0, [3, 20]] = True
    inputs["y"][1, 30] = True
    _, state = in_steps(module, given, [25, 1, 34], None, inputs)
    assert state is not None
    (kept,) = state.parts
    assert isinstance(kept, Kept)
    assert kept.positions.tolist() == [3, 20, 30, 58, 59]


def test_one_may_go_on_from_a_state_twice() -> None:
    module, given = module_of("causal attend favor(features = 8)"), tensors(30)
    _, state = in_steps(module, given, [20])
    last = part_of(given, 20, 30)
    first, _ = module.step(*last, state)
    again, _ = module.step(*last, state)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "body",
    ["window(before = 9, after = 0)", "window(before = 9, after = 0) + linear()"],
)
@pytest.mark.limits("", "tiny")
def test_long_steps_meet_few_keys_at_once(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []

    def seen(*given: Any) -> Seen:
        found = whole(*given)
        met.append(found.keys.shape[2])
        return found

    whole = Keeper.seen
    monkeypatch.setattr(Keeper, "seen", seen)
    module_of(f"causal attend {body}").step(*tensors(1000))
    assert len(met) == -(-1000 // LIMITS.stream)
    assert max(met) == LIMITS.stream + 9


@pytest.mark.parametrize("body", GRAPHS[:3])
def test_derivatives_of_steps_are_those_of_a_call(body: str) -> None:
    module, given = module_of(body), [x.requires_grad_() for x in tensors(40)]
    found = in_steps(module, (given[0], given[1], given[2]), [21, 19])[0]
    again, meant = (
        torch.autograd.grad(
            torch.autograd.grad(out.square().sum(), given, create_graph=True)[0].square().sum(),
            given,
        )
        for out in (found, module(*given))
    )
    for mine, theirs in zip(again, meant, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


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
        (
            "causal attend full",
            "`keep_all=True` keeps every key, in a state that grows, and a call takes the last"
            " queries with all keys",
        ),
        (
            "causal attend window(radius = isqrt(n))",
            "same row q at every n > q, .* but `window\\(radius = isqrt\\(n\\)\\)` has a size that"
            " reads n: write a number in place of `isqrt\\(n\\)`",
        ),
        (
            "causal attend window(radius = 3) | columns(last(2))",
            "but `columns\\(last\\(2\\)\\)` reads `last\\(2\\)`, other tokens at every length",
        ),
        ("causal attend window(radius = 3) & expander(degree = 2)", "draws cycles through all n"),
        ("causal attend window(radius = 3) scale 1 / log2(n + 1)", "`scale 1 / log2\\(n \\+ 1\\)`"),
        ("causal sequence grid(3, 1) attend axial", "a grid has no next position"),
        ("causal input x: ids attend same(x)", "no bound on how far back"),
        ("causal input x: tokens attend window(radius = 3) | columns(x)", "promises how many"),
        (
            "causal input x: tokens(at_most = 4) attend window(radius = 3) | global(x)",
            "no bound on how far back",
        ),
        (
            "causal input x: tokens(at_most = 4) input y: ids"
            " attend columns(x) & shift(same(y), by = 2)",
            "no bound on how far back",
        ),
        # a token that is marked would be read later than it is kept for
        (
            "causal input x: tokens(at_most = 4) attend shift(columns(x), by = 2)",
            "no bound on how far back",
        ),
        (
            "causal input x: length attend window(radius = 3) & prefix(x)",
            "not known before the end: where it is, call the module with the last queries",
        ),
        (
            "causal input x: ids attend shift(same(x), by = -1) & window(radius = 3)",
            "loses pairs at the last positions",
        ),
    ],
)
def test_what_cannot_go_on_says_why(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module_of(body).step(*tensors(3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("causal attend residue(step = 3)", "`residue\\(step = 3\\)` has no bound"),
        (
            "causal heads 2 attend window(radius = 3) | residue(step = 3) | columns(first(2))"
            " head 0 { attend self }",
            "`residue\\(step = 3\\)` in head 1 has no bound",
        ),
        (
            "causal layers 2 heads 2 attend self"
            " layer 1 { attend self | (self | powers(base = 2)) & residue(step = 2) }",
            "`.*powers.* & residue\\(step = 2\\)` in layer 1, head 0..1 has no bound",
        ),
    ],
)
def test_what_reads_back_without_bound_is_named(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module_of(body).step(*tensors(3), layer=1 if "layers" in body else 0)


def test_states_are_checked() -> None:
    module, given = module_of("causal attend linear()"), tensors(3)
    with pytest.raises(TypeError, match="state must be what a step returned"):
        module.step(*given, given[0])  # type: ignore[arg-type]
    for other in (
        "causal attend window(before = 3, after = 0)",
        "causal attend linear(feature = exp)",
    ):
        state = module_of(other).step(*given)[1]
        with pytest.raises(ValueError, match="the state is of another layer or module"):
            module.step(*given, state)
    stack = module_of("causal layers 2 attend linear() layer 1 { attend linear(feature = relu) }")
    with pytest.raises(ValueError, match="of another layer"):
        stack.step(*given, stack.step(*given, layer=0)[1], layer=1)
    # another module that computes the same may go on
    module_of("causal attend linear()").step(*given, module.step(*given)[1])
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


@pytest.mark.parametrize(
    "body",
    [
        "causal attend residue(step = 3)",
        "causal heads 2 attend window(before = 3, after = 0) head 1 { attend strided(stride = 5) }",
        "causal input x: ids attend same(x)",
        "causal input y: tokens(at_most = 12) attend window(radius = 3) | global(y)",
        "causal attend residue(step = 3) + linear()",
        "causal attend full score alibi()",
    ],
)
def test_heads_without_a_bound_may_keep_every_key(body: str) -> None:
    module, given = module_of(body), tensors(83)
    inputs = inputs_of(module, 83)
    meant, padding = module(*given, key_padding_mask=real_keys(83), inputs=inputs), real_keys(83)
    for sizes in ([1, 70, 12], [83]):
        outs, state, low = [], None, 0
        for size in sizes:
            at = slice(low, low + size)
            out, state = module.step(
                *part_of(given, low, low + size),
                state,
                key_padding_mask=padding[:, at],
                inputs={name: values[:, at] for name, values in inputs.items()},
                keep_all=True,
            )
            outs.append(out)
            low += size
        torch.testing.assert_close(torch.cat(outs, 2), meant, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "body",
    [
        "causal heads 2 attend window(before = 3, after = 0) head 1 { attend linear() }",
        "causal heads 2 attend block(size = 4) score bias(buckets = 8)",
        "causal attend (window(before = 9, after = 0) | columns(first(2))) + favor(features = 8)",
        "causal input y: tokens(at_most = 12) attend window(before = 2, after = 0) | columns(y)",
        "causal attend topk(keys = 4)",
    ],
)
def test_a_state_of_other_samples_goes_on_as_theirs(body: str) -> None:
    module, given = module_of(body), tensors(30)
    inputs, order = inputs_of(module, 30), torch.tensor([2, 0, 0, 1, 2])
    meant = module(*given, inputs=inputs)[order, :, 20:]
    early, late = (
        {name: values[:, at] for name, values in inputs.items()}
        for at in (slice(0, 20), slice(20, 30))
    )
    _, state = module.step(*part_of(given, 0, 20), inputs=early)
    chosen = state.selected(order).owned()
    assert chosen.samples == 5
    q, k, v = (x[order] for x in part_of(given, 20, 30))
    found, _ = module.step(q, k, v, chosen, inputs={x: t[order] for x, t in late.items()})
    torch.testing.assert_close(found, meant, rtol=1e-8, atol=1e-8)
    # the state that was there goes on as before
    again, _ = module.step(*part_of(given, 20, 30), state, inputs=late)
    torch.testing.assert_close(again[order], meant, rtol=1e-8, atol=1e-8)


def test_a_state_with_memory_of_its_own_holds_no_more() -> None:
    module = module_of("causal heads 2 attend window(before = 3, after = 0) head 1 { attend self }")
    _, state = module.step(*tensors(2, keys=2))
    held = [(x.untyped_storage().nbytes(), x.nbytes) for x in state.kept()]
    assert any(whole > own for whole, own in held)
    owned = [(x.untyped_storage().nbytes(), x.nbytes) for x in state.owned().kept()]
    assert owned == [(own, own) for _, own in held]


# --- in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("body", [*GRAPHS, "causal attend self", "causal attend columns(first(3))"])
def test_what_is_kept_may_be_written_over(body: str, padded: bool) -> None:
    module, n = module_of(body), 50
    given, padding = tensors(n), real_keys(n) if padded else None
    with torch.no_grad():
        meant = module(*given, key_padding_mask=padding)
        outs, state, low = [], None, 0
        # a long part between two runs of single positions
        for size in [11, *[1] * 20, 7, *[1] * 12]:
            at = slice(low, low + size)
            real = None if padding is None else padding[:, at]
            part = part_of(given, low, low + size)
            out, state = module.step(*part, state, key_padding_mask=real, in_place=True)
            outs.append(out)
            low += size
    torch.testing.assert_close(torch.cat(outs, 2), meant, rtol=1e-8, atol=1e-8)


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations make or write, views apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        views = [
            r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns
        ]
        if isinstance(found, torch.Tensor) and not any(views):
            self.numbers += found.numel()
        return found


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_in_place_copies_nothing_of_a_full_window(in_place: bool) -> None:
    module = module_of("causal attend window(before = 63, after = 0) | columns(first(4))")
    given, counts = part_of((torch.randn(1, 2, 140, 8),) * 3, 0, 140), []
    with torch.no_grad():
        _, state = module.float().step(*part_of(given, 0, 90))
        for low in range(90, 140):
            with Written() as seen:
                _, state = module.step(*part_of(given, low, low + 1), state, in_place=in_place)
            counts.append(seen.numbers)
    window = 64 * 8 * 2 * 2  # keys and values of two heads
    assert (max(counts[1:]) < window / 4) == in_place
    assert (min(counts) > window) != in_place


def test_a_state_that_is_not_given_up_stays() -> None:
    module = module_of("causal attend window(before = 5, after = 0)")
    given = tensors(40)
    meant = module(*given)
    with torch.no_grad():
        _, state = module.step(*part_of(given, 0, 30), in_place=True)
        _, state = module.step(*part_of(given, 30, 31), state, in_place=True)
        other, _later = module.step(*part_of(given, 7, 8), state)
        found, _ = module.step(*part_of(given, 31, 40), state)
    torch.testing.assert_close(found, meant[:, :, 31:], rtol=1e-8, atol=1e-8)
    assert not torch.allclose(other, meant[:, :, 31:32])
    # what is differentiated is not written over
    q, k, v = (x.clone().requires_grad_() for x in part_of(given, 31, 32))
    out, after = module.step(q, k, v, state, in_place=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.requires_grad or x.dtype == torch.bool for x in after.kept())


def test_what_inference_mode_made_goes_on_outside() -> None:
    module = module_of("causal attend window(before = 5, after = 0)")
    given = tensors(40)
    meant = module(*given)
    with torch.inference_mode():
        _, state = module.step(*part_of(given, 0, 30), in_place=True)
        _, state = module.step(*part_of(given, 30, 31), state, in_place=True)
    found, _ = module.step(*part_of(given, 31, 32), state, in_place=True)
    torch.testing.assert_close(found, meant[:, :, 31:32], rtol=1e-8, atol=1e-8)


RESIDUES = "causal attend window(before = 7, after = 0) & residue(step = 2)"


def one_by_one(
    module: CompiledAttention,
    given: Given,
    inference: Sequence[bool],
    real: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """The outputs of single steps in place, each in inference mode or not, with its padding."""
    outs, state = [], None
    for low, (inside, mask) in enumerate(zip(inference, real, strict=True)):
        with torch.inference_mode(inside):
            part = part_of(given, low, low + 1)
            out, state = module.step(*part, state, key_padding_mask=mask, in_place=True)
        outs.append(out)
    return outs


def test_what_inference_mode_looked_at_has_derivatives_outside() -> None:
    module, n = module_of(RESIDUES), 40
    q, k, v = tensors(n)
    meant = module(q, k, v)
    one_by_one(module, (q, k, v), [True] * n, [None] * n)
    outs = one_by_one(module, (q.requires_grad_(), k, v), [False] * n, [None] * n)
    torch.testing.assert_close(torch.cat(outs, 2), meant, rtol=1e-8, atol=1e-8)
    assert torch.autograd.grad(outs[-1].sum(), q)[0][:, :, -1].abs().sum() > 0


def test_padding_that_begins_in_inference_mode_goes_on_outside() -> None:
    module, n = module_of(RESIDUES), 40
    given, real = tensors(n), torch.ones(3, 1, dtype=torch.bool)
    inference, masks = [x == 20 for x in range(n)], [None if x < 20 else real for x in range(n)]
    outs = one_by_one(module, given, inference, masks)
    torch.testing.assert_close(torch.cat(outs, 2), module(*given), rtol=1e-8, atol=1e-8)


def test_keys_that_are_learned_are_not_written_over_by_others() -> None:
    module, n, learned = module_of(GRAPHS[0]), 12, 8
    q, k, v = tensors(n)
    prefix = k[:, :, :learned].clone().requires_grad_()
    given = q, torch.cat([prefix, k[:, :, learned:]], 2), v
    (meant,) = torch.autograd.grad(module(*given).square().sum(), prefix)
    outs, state = [], None
    for low in range(n):
        part = part_of((q, prefix if low < learned else k, v), low, low + 1)
        out, state = module.step(*part, state, in_place=True)
        outs.append(out)
    (found,) = torch.autograd.grad(torch.cat(outs, 2).square().sum(), prefix)
    torch.testing.assert_close(found, meant, rtol=1e-8, atol=1e-8)


# --- log-sum-exps, and what the data decide ------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 7, after = 0) normalize softmax1",
        "causal heads 2 attend window(radius = 4) | global(first(3))"
        " head 1 { attend dilated(radius = 12, step = 3) score alibi() }",
        "causal attend topk(keys = 4)",
        "causal attend window(before = 5, after = 0) - self",
    ],
)
def test_log_sum_exps_go_on_too(body: str, in_place: bool) -> None:
    module, given = module_of(body), tensors(50)
    with torch.no_grad():
        meant = module(*given, return_lse=True)
        outs, state, low = [], None, 0
        for size in [0, 11, 20, *[1] * 19]:
            part = part_of(given, low, low + size)
            step = module.step(*part, state, keep_all=True, in_place=in_place, return_lse=True)
            (out, lse), state = step
            outs.append((out, lse))
            low += size
    for found, right in zip(zip(*outs, strict=True), meant, strict=True):
        torch.testing.assert_close(torch.cat(found, 2), right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "body",
    ["rfa(features = 8)", "window(radius = 3) + linear(feature = identity)", "full normalize relu"],
)
def test_what_has_no_log_sum_exps_says_so(body: str) -> None:
    with pytest.raises(ValueError, match="divides by has no logarithm"):
        module_of(f"causal attend {body}").step(*tensors(5), keep_all=True, return_lse=True)


def test_given_buckets_and_choices_grow_with_the_positions() -> None:
    body = """causal input h: buckets input c: choices(size = 2)
        attend lsh(h, chunk = 4, cut = bucket, share_qk = false) | chosen(c) | self"""
    module, n, source = module_of(body), 30, torch.Generator().manual_seed(5)
    given = tensors(n)
    h = torch.randint(0, 4, (3, 1, 2, n), generator=source)
    own = torch.arange(n)[:, None] // 2
    c = torch.randint(-1, 2, (3, 2, n, 3), generator=source).clamp_max(own)
    meant = module(*given, inputs={"h": h, "c": c})
    outs, state, low = [], None, 0
    for size in [11, *[1] * 10, 9]:
        at = slice(low, low + size)
        inputs = {"h": h[..., at], "c": c[:, :, at]}
        out, state = module.step(*part_of(given, low, low + size), state, inputs=inputs)
        outs.append(out)
        low += size
    torch.testing.assert_close(torch.cat(outs, 2), meant, rtol=1e-8, atol=1e-8)


def test_queries_that_are_sorted_by_themselves_do_not_go_on() -> None:
    module = module_of("causal attend lsh(buckets = 4, chunk = 4, cut = bucket, share_qk = false)")
    q, k, v = tensors(20)
    # the last query is another where earlier ones are missing
    assert not torch.allclose(module(q[:, :, 10:], k, v), module(q, k, v)[:, :, 10:])
    with pytest.raises(ValueError, match="puts the queries of a call into chunks of their own"):
        module.step(q, k, v)


def test_a_state_is_printed_without_its_tensors() -> None:
    module = spec_of("causal attend window(before = 2, after = 0)").compile()
    x = torch.randn(1, 2, 5, 4)
    _, state = module.step(x, x, x)
    assert repr(state) == f"StreamState(position=5, of {state.tensors})"

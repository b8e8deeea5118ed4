"""Modules whose graphs read numbers: padding, divisions, transforms, steps, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle.dense import weights
from population import spec_of

from attnspec import SelfAttention, SpecError

EVENTS = (
    "causal input time: numbers"
    " attend where(time(k) <= time(q)) & window(radius = 20) | columns(first(2))"
)


def tensors(n: int) -> list[torch.Tensor]:
    """q of four heads, k and v of two, for two samples."""
    generator = torch.Generator().manual_seed(n)
    shapes = [(2, heads, n, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    "body",
    [
        EVENTS,
        "input time: numbers attend where(time(q) * time(k) <= 9) | self",
        "input time: numbers attend where(1 / time(k) > 0.3)",
        "input time: numbers attend where(time(q) / time(k) > 0.5)",
    ],
)
def test_what_stands_at_padding_is_never_read(body: str) -> None:
    module, parts = spec_of(body).compile(), tensors(40)
    padding = torch.arange(40) < torch.tensor([[40], [9]])
    time, outs = torch.randint(1, 9, (2, 40)), []
    for junk in (1, 0, 2**62, torch.nan, -torch.inf, 1e300):
        given = (time if isinstance(junk, int) else time.double()).masked_fill(~padding, junk)
        outs.append(module(*parts, inputs={"time": given}, key_padding_mask=padding))
        nothing = module(*parts, inputs={"time": given}, key_padding_mask=padding & False)
        assert not nothing.any()
    for out in outs[1:]:
        torch.testing.assert_close(out[:, :, :9], outs[0][:, :, :9])


@pytest.mark.parametrize("body", ["1 / t(k) > 0.3", "t(q) / t(k) > 0.5", "1 / (t(k) - 7) < -0.2"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_division_by_an_input_is_that_of_the_definition(body: str, whole: bool) -> None:
    spec, (q, k, v) = spec_of(f"input t: numbers attend where({body})"), tensors(5)
    t = torch.tensor([[1, 2, 4, 3, 5]]).expand(2, 5)
    inputs = {"t": t if whole else t.double()}
    pairs = torch.from_numpy(spec.mask(5, inputs={"t": t[0].numpy()}))
    module = spec.compile()
    assert (module.pairs(q, k, inputs=inputs) == pairs).all()
    wide, values = (x.repeat_interleave(2, 1) for x in (k, v))
    meant = weights(q @ wide.mT / 8**0.5, pairs, "softmax") @ values
    torch.testing.assert_close(module(q, k, v, inputs=inputs), meant)


@pytest.mark.parametrize(
    ("time", "error", "message"),
    [
        (torch.zeros(2, 5) > 0, TypeError, "floating type, got torch.bool"),
        (torch.zeros(2, 5, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(2, 4), ValueError, r"shape \[2, 5\], got \[2, 4\]"),
        (torch.zeros(5), ValueError, r"got \[5\]"),
        (3.0, TypeError, "must be a tensor, got float"),
        (np.zeros((2, 5)), TypeError, "must be a tensor, got ndarray"),
        (None, ValueError, r"integer or floating type \[B, n_k\]"),
    ],
)
def test_inputs_that_do_not_fit(time: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_of(EVENTS).compile()(*tensors(5), inputs=None if time is None else {"time": time})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t(k) // (n - 5) < 2", "of `n`, which may be 0 at n = 5"),
        ("t(k) % head < 2", "of `head`, which may be 0 at n = 5"),
        ("t(k) // 0 < 2", "divides by 0: keep"),
        ("t(k) * 2**61 < 5", r"may be above 2\*\*62"),
        ("4 / t(k) > 0", "divides by a whole number, of `t`, which may be 0"),
    ],
)
def test_what_may_be_0_or_too_large_is_named(body: str, reason: str) -> None:
    spec, t = spec_of(f"input t: numbers attend where({body})"), torch.arange(5)
    for ask in (
        lambda: spec.compile()(*tensors(5), inputs={"t": t.expand(2, 5)}),
        lambda: spec.mask(5, inputs={"t": t.numpy()}),
    ):
        # a mask is of one length and head
        with pytest.raises(ValueError, match=f"{reason}|divides by 0"):
            ask()


def test_what_a_step_cannot_know_is_refused() -> None:
    graph = "where(t(q) * t(k) <= 9) & window(before = 3, after = 0)"
    module, q = (
        spec_of(f"causal input t: numbers attend {graph}").compile(),
        torch.zeros(1, 1, 2, 4),
    )
    _, state = module.step(q, q, q, inputs={"t": torch.ones(1, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"2\*\*62"):
        module.step(q, q, q, state, inputs={"t": torch.full((1, 2), 2**40)})
    length = spec_of("causal input p: length attend where(k < p)").compile()
    with pytest.raises(ValueError, match="the length `p`, a number of the whole sequence"):
        length.step(q, q, q, inputs={"p": torch.tensor([1])})
    with pytest.raises(SpecError, match="`p` is a number"):
        spec_of("input p: length attend where(k < p(k))")


def test_extra_tokens_have_no_number() -> None:
    body = "extra_tokens 2 input t: numbers attend where(t(k) <= t(q)) | columns(first(2))"
    layer, x, time = SelfAttention(spec_of(body), 16, 2), torch.randn(2, 7, 16), torch.rand(2, 7)
    assert torch.isfinite(layer(x, inputs={"t": time})).all()
    with pytest.raises(TypeError, match="real beside extra tokens"):
        layer(x, inputs={"t": time.long()})


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_tensors_and_inputs(mapped: tuple[int | None, int | None]) -> None:
    module, (q, k, v) = spec_of(EVENTS).compile(), (x[:1] for x in tensors(12))
    qs, times = torch.randn(3, *q.shape, dtype=q.dtype), torch.rand(3, 1, 12)

    def one(q: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v, inputs={"time": time})
        return out

    given = [x if dim == 0 else x[0] for x, dim in zip((qs, times), mapped, strict=True)]
    found = torch.vmap(one, in_dims=mapped)(*given)
    for at in range(3):
        mine = [x[at] if dim == 0 else x for x, dim in zip(given, mapped, strict=True)]
        torch.testing.assert_close(found[at], one(*mine))


@pytest.mark.parametrize("graph", ["axial", "neighborhood(3, 3)", "where(q.col >= k.col)"])
def test_a_grid_of_no_cells_has_an_empty_output(graph: str) -> None:
    spec, (q, k, v) = spec_of(f"sequence grid(1, n) attend {graph}"), tensors(0)
    assert spec.compile()(q, k, v).shape == q.shape
    assert spec.mask(0).shape == (0, 0)

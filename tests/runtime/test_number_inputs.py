"""Modules whose graphs read numbers: values, gradients, padding, steps, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnspec
from attnspec.runtime.module import CompiledAttention

EVENTS = """
attention events(radius = 20) {
    causal
    input time: numbers
    attend where(time(k) <= time(q)) & window(radius = radius) | columns(first(2))
}
"""


def compiled(backend: str = "auto") -> CompiledAttention:
    return attnspec.parse(EVENTS).compile(backend=backend)


def tensors(n: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q of four heads, k and v of two, for two samples."""
    torch.manual_seed(n)
    return [torch.randn(2, heads, n, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def expected(parts: list[torch.Tensor], pairs: torch.Tensor) -> torch.Tensor:
    q, k, v = parts
    out = scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=True)
    return torch.where(pairs.any(-1, keepdim=True), out, 0.0)


def test_what_stands_at_padding_is_never_read() -> None:
    module, n = compiled(), 40
    parts = tensors(n)
    padding = torch.arange(n) < torch.tensor([[n], [9]])
    time = torch.rand(2, n)
    outs = []
    for junk in (0.5, torch.nan, -torch.inf, 1e300):
        given = time.double().masked_fill(~padding, junk)
        outs.append(module(*parts, inputs={"time": given}, key_padding_mask=padding))
    assert all(torch.equal(out, outs[0]) for out in outs)
    # whole numbers out of bounds there are none either
    product = attnspec.parse("attention a { input t: numbers attend where(t(q) * t(k) <= 9) }")
    given = torch.where(padding, 2, 2**62)
    out = product.compile()(*parts, inputs={"t": given}, key_padding_mask=padding)
    assert torch.isfinite(out).all()


def test_a_step_refuses_what_would_not_be_exact() -> None:
    spec = attnspec.parse(
        "attention a { causal input t: numbers"
        " attend where(t(q) * t(k) <= 9) & window(before = 3, after = 0) }"
    )
    q = torch.zeros(1, 1, 2, 4)
    module = spec.compile()
    _, state = module.step(q, q, q, inputs={"t": torch.ones(1, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"2\*\*62"):
        module.step(q, q, q, state, inputs={"t": torch.full((1, 2), 2**40)})


def test_no_positions() -> None:
    out = compiled()(*tensors(0), inputs={"time": torch.zeros(2, 0)})
    assert out.shape == (2, 4, 0, 8)


@pytest.mark.parametrize(
    ("time", "error", "message"),
    [
        (
            torch.zeros(2, 5, dtype=torch.bool),
            TypeError,
            "floating type, got torch.bool",
        ),
        (torch.zeros(2, 5, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(2, 4), ValueError, r"shape \[2, 5\], got \[2, 4\]"),
        (torch.zeros(5), ValueError, r"got \[5\]"),
        (3.0, TypeError, "must be a tensor, got float"),
        (np.zeros((2, 5)), TypeError, "must be a tensor, got ndarray"),
    ],
)
def test_inputs_that_do_not_fit(time: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compiled()(*tensors(5), inputs={"time": time})
    with pytest.raises(ValueError, match=r"integer or floating type \[B, n_k\]"):
        compiled()(*tensors(5))


def test_extra_tokens_have_no_number() -> None:
    spec = attnspec.parse(
        "attention a { extra_tokens 2 input t: numbers"
        " attend where(t(k) <= t(q)) | columns(first(2)) }"
    )
    layer = attnspec.SelfAttention(spec, 16, 2)
    x, time = torch.randn(2, 7, 16), torch.rand(2, 7)
    assert torch.isfinite(layer(x, inputs={"t": time})).all()
    with pytest.raises(TypeError, match="real beside extra tokens"):
        layer(x, inputs={"t": time.long()})


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_tensors_and_inputs(mapped: tuple[int | None, int | None]) -> None:
    module, n = compiled(), 12
    q, k, v = (x.detach()[:1] for x in tensors(n))
    qs, times = torch.randn(3, *q.shape, dtype=q.dtype), torch.rand(3, 1, n)

    def one(q: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v, inputs={"time": time})
        return out

    given = [x if dim == 0 else x[0] for x, dim in zip((qs, times), mapped, strict=True)]
    found = torch.vmap(one, in_dims=mapped)(*given)
    for at in range(3):
        mine = [x[at] if dim == 0 else x for x, dim in zip(given, mapped, strict=True)]
        assert torch.allclose(found[at], one(*mine), atol=1e-10)


@pytest.mark.parametrize("body", ["1 / t(k) > 0.3", "t(q) / t(k) > 0.5", "1 / (t(k) - 7) < -0.2"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_division_by_an_input_is_that_of_the_definition(body: str, whole: bool) -> None:
    spec = attnspec.parse(f"attention a {{ input t: numbers attend where({body}) }}")
    t = torch.tensor([[1, 2, 4, 3, 5]])
    t = t if whole else t.double()
    q = torch.randn(1, 2, 5, 4)
    pairs = torch.from_numpy(spec.mask(5, inputs={"t": t[0].numpy()}))
    module = spec.compile()
    assert (module.pairs(q, q, inputs={"t": t}) == pairs).all()
    wanted = scaled_dot_product_attention(q, q, q, attn_mask=pairs)
    wanted = wanted.masked_fill(~pairs.any(-1)[:, None], 0.0)
    torch.testing.assert_close(module(q, q, q, inputs={"t": t}), wanted)


@pytest.mark.parametrize("body", ["1 / t(k) > 0.3", "t(q) / t(k) > 0.5"])
def test_no_division_fails_by_what_stands_at_padding(body: str) -> None:
    module = attnspec.parse(f"attention a {{ input t: numbers attend where({body}) }}").compile()
    q = torch.randn(2, 2, 4, 4)
    real = torch.tensor([[True, True, True, False], [False, True, True, False]])
    t = torch.tensor([[1, 2, 4, 0], [0, 3, 1, 2**62]])
    found = module(q, q, q, inputs={"t": t}, key_padding_mask=real)
    tame = module(q, q, q, inputs={"t": t.masked_fill(~real, 1)}, key_padding_mask=real)
    torch.testing.assert_close(found[:, :, 1:3], tame[:, :, 1:3])
    nothing = module(q, q, q, inputs={"t": t * 0}, key_padding_mask=real & False)
    assert (nothing == 0).all()


def test_a_whole_divisor_that_may_be_0_is_refused_as_that() -> None:
    spec = attnspec.parse("attention a { input t: numbers attend where(4 / t(k) > 0) }")
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(ValueError, match="divides by a whole number, of `t`, which may be 0"):
        spec.mask(2, inputs={"t": [0, 1]})
    with pytest.raises(ValueError, match="divides by a whole number, of `t`, which may be 0"):
        spec.compile()(q, q, q, inputs={"t": torch.tensor([[0, 1]])})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t(k) // (n - 5) < 2", "of `n`, which may be 0 at n = 5"),
        ("t(k) % head < 2", "of `head`, which may be 0 at n = 5"),
        ("t(k) // 0 < 2", "divides by 0: keep"),
        ("t(k) * 2**61 < 5", r"may be above 2\*\*62"),
    ],
)
def test_what_may_be_0_is_named(body: str, reason: str) -> None:
    spec = attnspec.parse(f"attention a {{ input t: numbers attend where({body}) }}")
    q, t = torch.randn(1, 1, 5, 4), torch.arange(5)[None]
    with pytest.raises(ValueError, match=reason):
        spec.compile()(q, q, q, inputs={"t": t})


def test_a_length_has_no_position_and_is_not_known_in_a_step() -> None:
    with pytest.raises(attnspec.SpecError, match="`p` is a number"):
        attnspec.parse("attention a { input p: length attend where(k < p(k)) }")
    module = attnspec.parse("attention a { causal input p: length attend where(k < p) }").compile()
    q, k, v = (x[:, :, :1] for x in tensors(4))
    with pytest.raises(ValueError, match="the length `p`, a number of the whole sequence"):
        module.step(q, k, v, inputs={"p": torch.tensor([1, 1])})


@pytest.mark.parametrize("graph", ["axial", "neighborhood(3, 3)", "where(q.col >= k.col)"])
def test_a_grid_of_no_cells_has_an_empty_output(graph: str) -> None:
    spec = attnspec.parse(f"attention a {{ sequence grid(1, n) attend {graph} }}")
    q, k, v = tensors(0)
    assert spec.compile()(q, k, v).shape == q.shape
    assert spec.mask(0).shape == (0, 0)

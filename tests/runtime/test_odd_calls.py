"""What people and machines feed a module: one test for each kind of bad or odd input."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from attention_checks import tensors, with_gradients
from population import spec_of
from torch import nn
from torch.nn.utils import parametrize

from attnspec import SelfAttention

BODIES = (
    "causal attend window(before = 9, after = 0) | columns(first(2))",
    "attend block(size = 16) | global(first(3))",
    "attend random(keys = 3, seed = 2) | self",
    "heads 4 attend full score bias(buckets = 4)",
    "causal attend linear()",
    "attend topk(keys = 4)",
)

every_body = pytest.mark.parametrize("body", BODIES)


def drawn(body: str) -> Any:
    module = spec_of(body).compile(head_size=8)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def given(n: int = 40, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [x.detach() for x in tensors(2, 4, n, n, key_heads=2, dtype=dtype)]


# --- keywords of others --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("attn_mask", "`forward` takes no `attn_mask`: which pairs there are stands in the spec"),
        ("is_causal", "stands in the spec, as the statement `causal`"),
        ("scale", "stands in the spec, as `scale 1 / 8`"),
        ("enable_gqa", "fewer heads than queries as they are"),
        ("doc", "it is an input of the spec, `inputs={'doc': tensor}`"),
        ("dropout", "did you mean `dropout_p`?"),
        ("layers", "did you mean `layer`?"),
        ("zzz", "it takes layer, key_padding_mask, dropout_p, inputs, return_lse, query_start"),
    ],
)
def test_a_keyword_that_a_call_does_not_take_is_refused_with_the_way_out(
    keyword: str, message: str
) -> None:
    """In the very words that the spec or the call has for it; what they advise is taken."""
    spec = spec_of("input doc: ids causal scale 1 / 8 attend same(doc)")
    module: Any = spec.compile()
    q, k, v = given()
    with pytest.raises(TypeError, match=re.escape(message)):
        module(q, k, v, **{keyword: torch.ones(2, 40)})
    emitted: dict[str, Any] = {"__name__": "emitted"}
    exec(spec.emit(), emitted)
    own = next(x for x in emitted.values() if getattr(x, "__module__", "") == "emitted")
    with pytest.raises(TypeError, match=re.escape(message)):
        own()(q, k, v, **{keyword: 1})
    with pytest.raises(TypeError, match=f"`step` takes no `{keyword}`: "):
        module.step(q, k, v, **{keyword: 1})
    layer: Any = SelfAttention(spec_of("causal attend full"), 8, 2)
    for call in (layer, layer.step):
        with pytest.raises(TypeError, match=f"takes no `{keyword}`: "):
            call(torch.randn(1, 3, 8), **{keyword: 1})


# --- masks and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES[:4])
def test_what_is_not_a_number_is_never_hidden(body: str) -> None:
    """A row that reads it is not a number; a query's own stays in its row. That masked NaN may
    reach other rows, 0 times NaN being NaN, is said where the module is described."""
    module, (q, k, v) = drawn(body), given()
    reads = module.pairs(q, k)[:, :, :, 5]
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = v.clone()
        broken[:, :, 5] = bad
        assert not module(q, k, broken)[reads].isfinite().any()
    broken = q.clone()
    broken[:, :, 5] = torch.nan
    out, meant = module(broken, k, v), module(q, k, v)
    other = torch.arange(40) != 5
    torch.testing.assert_close(out[:, :, other], meant[:, :, other])
    assert out[:, :, 5].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("body", BODIES[:4])
def test_large_and_small_numbers(body: str, dtype: torch.dtype) -> None:
    """Products above what half types hold, values at their end, and denormal numbers. Sums of
    values before they are divided must be in float32's range, as in torch's own attention."""
    # heads of size 4 are scaled by an exact half, so that equal scores stay equal
    module, (q, k, v) = drawn(body), (x[..., :4] for x in given())
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 64)
    scale = 240.0 if dtype == torch.float16 else 2.0**27
    loud = [
        (q.sign() * scale).to(dtype),
        (k.sign() * scale).to(dtype),
        v.sign().to(dtype) * largest,
    ]
    out = module(*loud)
    assert out.isfinite().all()
    if "bias" not in body:
        # a bias is lost beside such scores
        meant = module(*(x.double() for x in loud))
        torch.testing.assert_close(out.double() / largest, meant / largest, rtol=0.02, atol=0.02)
    tiny = [(x * torch.finfo(dtype).smallest_normal / 4).to(dtype) for x in (q, k, v)]
    assert module(*tiny).isfinite().all()


def test_sums_over_features_may_vanish() -> None:
    """Where the features of all keys are 0 there is no weight, and no NaN."""
    for name in ("linear()", "favor(features = 8)", "taylor()", "rfa(features = 8)"):
        for causal in ("", "causal "):
            module = spec_of(f"{causal}attend {name}").compile(head_size=8)
            for size in (0.0, -100.0, 1e4):
                parts = [torch.full((1, 2, 20, 8), size, requires_grad=True) for _ in range(3)]
                out = module(*parts)
                assert all(x.isfinite().all() for x in with_gradients(out, parts)), (name, size)


def test_long_sums_are_kept_wide() -> None:
    module = spec_of("causal attend linear()").compile()
    parts = [x.bfloat16() for x in given(2048)]
    wide = module(*(x.float() for x in parts))
    assert (module(*parts).float() - wide).abs().max() < 0.05


def test_vectors_that_are_equal_or_zero_are_hashed() -> None:
    for body in ("attend lsh(buckets = 4, chunk = 8)", "attend cluster(count = 3)"):
        module = spec_of(body).compile(head_size=8)
        for fill in (0.0, 1.0):
            x = torch.full((1, 2, 50, 8), fill, requires_grad=True)
            out = module(x, x, x)
            assert all(g.isfinite().all() for g in with_gradients(out, [x]))
            # ties go to the lowest number, so that the choice is the same again
            assert torch.equal(module.pairs(x, x), module.pairs(x, x))


def test_more_numbers_than_32_bits_count() -> None:
    parts = [torch.empty(2048, 64, 256, 128, device="meta") for _ in range(3)]
    assert spec_of(BODIES[0]).compile()(*parts).shape == (2048, 64, 256, 128)
    # products of positions, 46,341 squared and more, are counted in 64 bits
    module = spec_of("cross attend where((q * k * k) % 7 == 3)").compile()
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 8000, 4)
    found = module.pairs(q, k, query_start=99_999)[0, 0, 0].nonzero().flatten().tolist()
    assert found == [k for k in range(8000) if 99_999 * k * k % 7 == 3]


# --- memory --------------------------------------------------------------------------------------


@every_body
@pytest.mark.parametrize("n", [40, 200])
def test_tensors_of_any_strides(body: str, n: int) -> None:
    module, plain = drawn(body), given(n)
    meant = module(*plain)
    laid: list[list[torch.Tensor]] = [
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain],
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in plain],
        [torch.cat([x, x], 3)[..., :8] for x in plain],
        [torch.cat([x, x], 2)[:, :, n:] for x in plain],
        [x.repeat_interleave(2, 3)[..., ::2] for x in plain],
        [x.to(memory_format=torch.channels_last) for x in plain],
    ]
    for parts in laid:
        before = [x.clone() for x in parts]
        torch.testing.assert_close(module(*parts), meant)
        assert all(torch.equal(x, y) for x, y in zip(parts, before, strict=True))
    one = [x[:1, :1].expand(2, x.shape[1], -1, -1) for x in plain]
    torch.testing.assert_close(module(*one), module(*(x.contiguous() for x in one)))


# --- modes and copies ----------------------------------------------------------------------------


@every_body
def test_dropout_of_all_and_of_some(body: str) -> None:
    module, parts = drawn(body).eval(), [x.requires_grad_() for x in given()]
    if "linear" in body:
        with pytest.raises(ValueError, match="`linear` has no weights to drop"):
            module(*parts, dropout_p=0.5)
        return
    out = module(*parts, dropout_p=1.0)
    assert not out.any()
    assert all(x.isfinite().all() for x in with_gradients(out, parts))
    # a call says what is dropped, whatever the module's mode is
    assert not torch.equal(module(*parts, dropout_p=0.5), module(*parts))


def test_hooks_parametrizations_and_accumulated_gradients() -> None:
    module, parts = drawn(BODIES[3]), given()
    assert set(module.state_dict()) == {"bias_0"}
    fresh = drawn(BODIES[3])
    fresh.load_state_dict(module.state_dict(), strict=True)
    once = torch.autograd.grad(module(*parts).sum(), module.bias_0)[0]
    for _ in range(2):
        module(*parts).sum().backward()
    torch.testing.assert_close(module.bias_0.grad, 2 * once)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    seen: list[torch.Size] = []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    parametrize.register_parametrization(module, "bias_0", Twice())
    found = module(*parts)
    handle.remove()
    assert seen == [found.shape]
    with torch.no_grad():
        fresh.bias_0.mul_(2)
    torch.testing.assert_close(found, fresh(*parts))


@pytest.mark.parametrize("body", [*BODIES, "input x: ids attend same(x)"])
def test_what_is_written_over_before_derivatives_is_told(body: str) -> None:
    module, parts = drawn(body), [x.requires_grad_() for x in given()]
    real, x = torch.arange(40) < torch.tensor([[40], [30]]), torch.randint(3, (2, 40))
    more = {"inputs": {"x": x}} if "input" in body else {"key_padding_mask": real}
    out, lse = module(*parts, return_lse=True, **more)
    loss = out.sum() + lse[lse.isfinite()].sum()
    once, again = (torch.autograd.grad(loss, parts, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    if "input" in body:
        x += 1
    else:
        real[:, 20:] = False
    for each in (out, lse):
        with pytest.raises(RuntimeError, match=r"written over before.*pass a `.clone\(\)`"):
            torch.autograd.grad(each.sum(), parts[:2], retain_graph=True)


# --- numbers that are none -----------------------------------------------------------------------


@every_body
@pytest.mark.parametrize(("name", "value"), [("q", torch.nan), ("k", torch.inf), ("v", -torch.inf)])
def test_what_is_not_finite_is_named_where_it_stands(body: str, name: str, value: float) -> None:
    module = spec_of(body).compile(head_size=8, check_finite=True)
    q, k, v = given()
    plain = spec_of(body).compile(head_size=8)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(q, k, v), plain(q, k, v))
    {"q": q, "k": k, "v": v}[name][1, 1, 7, 3:5] = value
    words = f"{name} must be finite, got {value} at sample 1, head 1, position 7, number 3, and 2"
    # also where no query reads it
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, 7] = False
    for mask in (None, real):
        with pytest.raises(ValueError, match=words):
            module(q, k, v, key_padding_mask=mask)
    plain(q, k, v)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(ValueError, match=words):
            copied(q, k, v)
    module.check_finite = False
    module(q, k, v)


def test_steps_scores_and_traces_are_looked_at() -> None:
    text = (
        "input s: scores(size = 4) causal attend topk(blocks = 2, size = 4, queries = 1, score = s)"
    )
    module = spec_of(text).compile(check_finite=True)
    q, k, v = given(12)
    scores = torch.randn(2, 1, 12, 3)
    scores[0, 0, 5, 2] = -torch.inf
    module(q, k, v, inputs={"s": scores})
    scores[1, 0, 6, 1] = torch.nan
    with pytest.raises(ValueError, match=r"input `s` must be finite.*query block 6, key block 1"):
        module(q, k, v, inputs={"s": scores})
    near = spec_of("causal attend window(before = 3, after = 0)").compile(check_finite=True)
    _, state = near.step(q, k, v)
    with pytest.raises(ValueError, match="v must be finite"):
        near.step(q, k, v / 0, state)
    with pytest.raises(ValueError, match=r"set `module.check_finite = False`"):
        torch.func.vmap(near)(q[None], k[None], v[None])

"""What people and machines feed a module: odd numbers, memory, modes and copies."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from attention_checks import GRAPHS, learner_of, tensors, with_gradients
from population import spec_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from views import KERNELS

BODIES = (
    "causal attend window(before = 9, after = 0) | columns(first(2))",
    "attend random(keys = 3, seed = 2) | self",
    "heads 4 attend full score bias(buckets = 4)",
    "causal attend linear()",
    "attend topk(keys = 4)",
)
TAKING_GRAPHS = [name for name in KERNELS if name != "factored"]


def given(n: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach() for x in tensors(2, 4, n, n, key_heads=2, dtype=dtype)]


@pytest.mark.parametrize("body", BODIES[:3])
def test_non_finite_numbers_stay_visible_in_every_row_that_reads_them(body: str) -> None:
    """A row that reads it is not a number; a query's own stays in its row. That masked NaN may
    reach other rows, 0 times NaN being NaN, is said where the module is described."""
    module, (q, k, v) = learner_of(body).float(), given()
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
@pytest.mark.parametrize("body", BODIES[:2])
def test_large_and_small_numbers(body: str, dtype: torch.dtype) -> None:
    """Products above what half types hold, values at their end, and denormal numbers."""
    # heads of size 4 are scaled by an exact half, so that equal scores stay equal
    module, (q, k, v) = learner_of(body).float(), (x[..., :4] for x in given())
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 64)
    scale = 240.0 if dtype == torch.float16 else 2.0**27
    loud = [(x.sign() * scale).to(dtype) for x in (q, k)] + [v.sign().to(dtype) * largest]
    out, meant = module(*loud), module(*(x.double() for x in loud))
    torch.testing.assert_close(out.double() / largest, meant / largest, rtol=0.02, atol=0.02)
    tiny = [(x * torch.finfo(dtype).smallest_normal / 4).to(dtype) for x in (q, k, v)]
    assert module(*tiny).isfinite().all()


def test_vectors_that_are_equal_or_zero_are_hashed() -> None:
    for body in ("attend lsh(buckets = 4, chunk = 8)", "attend cluster(count = 3)"):
        module = spec_of(body).compile(head_size=8)
        for fill in (0.0, 1.0):
            x = torch.full((1, 2, 50, 8), fill, requires_grad=True)
            assert all(g.isfinite().all() for g in with_gradients(module(x, x, x), [x]))


def test_products_of_positions_are_counted_in_64_bits() -> None:
    module = spec_of("cross attend where((q * k * k) % 7 == 3)").compile()
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 8000, 4)
    found = module.pairs(q, k, query_start=99_999)[0, 0, 0].nonzero().flatten().tolist()
    assert found == [k for k in range(8000) if 99_999 * k * k % 7 == 3]


@pytest.mark.parametrize("kernel", TAKING_GRAPHS)
def test_nothing_to_attend_gives_zeros_or_nothing(kernel: str) -> None:
    module = spec_of(GRAPHS["strided"]).compile(backend=kernel)
    for batch, n_q, n_k in ((2, 0, 0), (0, 5, 5), (2, 0, 5), (0, 0, 0)):
        parts = tensors(batch, 2, n_q, n_k, out_size=3)
        out, lse = module(*parts, return_lse=True)
        assert (out.shape, lse.shape) == ((batch, 2, n_q, 3), (batch, 2, n_q))
        _, *grads = with_gradients(out, parts)
        assert [grad.shape for grad in grads] == [x.shape for x in parts]
        assert not any(grad.any() for grad in grads)
    module = spec_of("sequence grid(1, n) attend neighborhood(3, 3)").compile()
    assert module(*tensors(2, 2, 0, 0, out_size=3)).shape == (2, 2, 0, 3)


@pytest.mark.parametrize("kernel", ["torch", "tables", "dense"])
@pytest.mark.parametrize(("normalize", "empty"), [("softmax", -math.inf), ("softmax1", 0.0)])
def test_many_rows_in_succession_have_no_key(kernel: str, normalize: str, empty: float) -> None:
    body = f"attend window(radius = 3) - rows(first(200)) normalize {normalize}"
    out, lse = spec_of(body).compile(kernel)(*tensors(1, 2, 230, 230), return_lse=True)
    assert (lse[:, :, :200] == empty).all()
    assert not out[:, :, :200].any()
    assert (lse[:, :, 200:].abs() > 0).all()


def test_tensors_without_numbers_have_shapes() -> None:
    parts = [x.detach().to("meta").requires_grad_() for x in tensors(2, 2, 40, 40, out_size=5)]
    doc = {"doc": torch.zeros(2, 40, dtype=torch.long, device="meta")}
    documents = "input doc: ids attend same(doc)"
    for body in ("attend window(radius = 3)", "heads 2 attend full score bias()", documents):
        module = spec_of(body).compile().to("meta")
        out = module(*parts, inputs=doc if body == documents else None)
        assert (out.shape, out.device.type) == ((2, 2, 40, 5), "meta")
        out.sum().backward()
        assert parts[0].grad is not None


@pytest.mark.parametrize(
    "body",
    [
        "causal input time: numbers"
        " attend where(time(k) <= time(q)) & window(radius = 20) | columns(first(2))",
        "input time: numbers attend where(time(q) * time(k) <= 9) | self",
        "input time: numbers attend where(time(q) / time(k) > 0.5)",
    ],
)
def test_inputs_at_padding_are_never_read(body: str) -> None:
    module, parts = spec_of(body).compile(), given(40)
    padding = torch.arange(40) < torch.tensor([[40], [9]])
    time, outs = torch.randint(1, 9, (2, 40)), []
    for junk in (1, 0, 2**62, torch.nan, -torch.inf, 1e300):
        values = (time if isinstance(junk, int) else time.double()).masked_fill(~padding, junk)
        outs.append(module(*parts, inputs={"time": values}, key_padding_mask=padding))
        assert not module(*parts, inputs={"time": values}, key_padding_mask=padding & False).any()
    for out in outs[1:]:
        torch.testing.assert_close(out[:, :, :9], outs[0][:, :, :9])


@pytest.mark.parametrize("body", [*BODIES[:4], "input x: ids attend same(x)"])
def test_padding_and_inputs_are_not_written_over_before_derivatives(body: str) -> None:
    module, parts = learner_of(body).float(), [x.requires_grad_() for x in given()]
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
        with pytest.raises(RuntimeError, match=r"changed in place before.*pass a `.clone\(\)`"):
            torch.autograd.grad(each.sum(), parts[:2], retain_graph=True)


def test_hooks_and_parametrizations() -> None:
    module, parts, seen = learner_of(BODIES[2]).float(), given(), []

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    fresh = copy.deepcopy(module)
    module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    parametrize.register_parametrization(module, "bias_0", Twice())
    found = module(*parts)
    assert seen == [found.shape]
    with torch.no_grad():
        fresh.bias_0.mul_(2)
    torch.testing.assert_close(found, fresh(*parts))


def test_tables_of_layers_and_heads_are_their_own() -> None:
    module = learner_of(
        "layers 2 heads 3 attend full score bias(buckets = 4) layer 1 { attend self }"
    )
    (table,) = module.parameters()
    assert table.shape == (2, 3, 4)
    module.reset_parameters()
    assert not table.any()
    parts = tensors(1, 3, 9, 9)
    plain = module(*parts)
    with torch.no_grad():
        table[0, 1] = torch.tensor([3.0, -1.0, 0.5, 2.0])
    changed = module(*parts)
    assert torch.equal(changed[:, [0, 2]], plain[:, [0, 2]])
    assert not torch.equal(changed[:, 1], plain[:, 1])


def test_autocast_leaves_what_is_wrong_to_the_checks() -> None:
    module, (q, k, v) = spec_of("attend full").compile(), given(9)
    with torch.autocast("cpu"):
        with pytest.raises(TypeError, match="k must be a tensor, got ndarray"):
            module(q, k.numpy(), v)
        with pytest.raises(TypeError, match=r"got q torch\.int64"):
            module(q.long(), k.long(), v.long())
        assert module(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_tensors_and_inputs(mapped: tuple[int | None, int | None]) -> None:
    body = "input time: numbers attend where(time(k) <= time(q)) & window(radius = 20)"
    module, (q, k, v) = spec_of(body).compile(), (x[:1] for x in given(12))
    qs, times = torch.randn(3, *q.shape, dtype=q.dtype), torch.rand(3, 1, 12)

    def one(q: Tensor, time: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, inputs={"time": time})
        return out

    several = [x if dim == 0 else x[0] for x, dim in zip((qs, times), mapped, strict=True)]
    found = torch.vmap(one, in_dims=mapped)(*several)
    for at in range(3):
        mine = [x[at] if dim == 0 else x for x, dim in zip(several, mapped, strict=True)]
        torch.testing.assert_close(found[at], one(*mine))


@pytest.mark.parametrize(("name", "value"), [("q", torch.nan), ("k", torch.inf), ("v", -torch.inf)])
def test_check_finite_names_the_place_of_a_non_finite_number(name: str, value: float) -> None:
    module, plain = (spec_of(BODIES[0]).compile(check_finite=check) for check in (True, False))
    q, k, v = given()
    assert torch.equal(module(q, k, v), plain(q, k, v))
    {"q": q, "k": k, "v": v}[name][1, 1, 7, 3:5] = value
    words = f"{name} must be finite, got {value} at sample 1, head 1, position 7, number 3; 2 of"
    # also where no query reads it
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, 7] = False
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for mask in (None, real):
            with pytest.raises(ValueError, match=words):
                each(q, k, v, key_padding_mask=mask)
    module.check_finite = False
    module(q, k, v)


def test_check_finite_covers_steps_scores_and_traces() -> None:
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

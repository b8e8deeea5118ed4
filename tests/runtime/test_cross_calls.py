"""Calls of m queries with n keys of another sequence: values, gradients, choices, every way in."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_checks import ALONG
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attnspec
from attnspec.lower.work import BackendError
from attnspec.runtime.module import CompiledAttention
from attnspec.spec import Spec, parse

SIZES = ((0, 5), (5, 0), (1, 1), (7, 16), (33, 20), (130, 257))
"""Queries and keys."""

HEADS, KEY_HEADS, WIDTH = 4, 2, 8

GRAPHS = (
    "full",
    "where(abs(q * n - k * m) <= 2 * m) | columns(first(2))",
    "~window(radius = 4) & where(k % 3 != 1)",
    "global(last(2)) | shift(window(radius = 2), by = -3)",
    "block(size = 32, before = 1) - transpose(rows(last(3)))",
    "self",
)


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ cross {body} }}")


def tensors(m: int, n: int, batch: int = 2) -> list[torch.Tensor]:
    """q, k and v in float64, two queries' heads to a head of keys."""
    torch.manual_seed(m * 1000 + n)
    shapes = ((HEADS, m, WIDTH), (KEY_HEADS, n, WIDTH), (KEY_HEADS, n, WIDTH - 2))
    return [torch.randn(batch, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


def dense(
    parts: list[torch.Tensor], pairs: torch.Tensor, padding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its log-sum-exps by the formula, with a mask that broadcasts to
    [B, H, m, n]."""
    q, k, v = parts
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    held = pairs.expand(scores.shape)
    if padding is not None:
        held = held & padding[:, None, None]
    # a row without a pair is cut off, so that nothing of it is infinite
    some = held.any(-1, keepdim=True)
    scores = scores.masked_fill(~held, -torch.inf).masked_fill(~some, 0.0)
    weights = scores.softmax(-1).masked_fill(~held, 0.0)
    lse = scores.logsumexp(-1) if k.shape[2] else scores.new_zeros(scores.shape[:3])
    return weights @ v, lse.masked_fill(~some[..., 0], -torch.inf)


def padding_of(n: int) -> torch.Tensor:
    return torch.rand(2, n) > 0.2


def assert_computes(
    module: CompiledAttention, parts: list[torch.Tensor], pairs: torch.Tensor, **given: Any
) -> None:
    """Outputs, log-sum-exps and gradients are those of the formula."""
    out, lse = module(*parts, return_lse=True, **given)
    expected, sums = dense(parts, pairs, given.get("key_padding_mask"))
    assert torch.allclose(out, expected)
    assert torch.allclose(lse, sums)
    grad, known = torch.randn_like(out), sums.isfinite()
    both = [
        torch.autograd.grad(
            (one * grad).sum() + other[known].sum(),
            parts,
            allow_unused=True,
            materialize_grads=True,
        )
        for one, other in ((out, lse), (expected, sums))
    ]
    assert all(torch.allclose(mine, theirs) for mine, theirs in zip(*both, strict=True))


@pytest.mark.parametrize("graph", GRAPHS)
def test_calls_are_the_dense_formula(graph: str) -> None:
    spec = spec_of(f"attend {graph}")
    module = spec.compile()
    for m, n in SIZES:
        pairs = torch.from_numpy(spec.mask(n, m=m))
        for padding in (None, padding_of(n)):
            assert_computes(module, tensors(m, n), pairs, key_padding_mask=padding)


@pytest.mark.parametrize("backend", ["dense", "torch", "tiles", "bands", "scattered", "rows"])
def test_every_backend_takes_two_sequences(backend: str) -> None:
    spec = spec_of(f"attend {GRAPHS[1]}")
    module = spec.compile(backend=backend)
    for m, n in ((7, 16), (12, 5), (70, 33), (33, 150)):
        if backend == "rows" and m > 16:
            with pytest.raises(BackendError, match="the last 16 queries"):
                module(*tensors(m, n))
            continue
        pairs = torch.from_numpy(spec.mask(n, m=m))
        assert_computes(module, tensors(m, n), pairs, key_padding_mask=padding_of(n))


def test_weights_may_be_changed_and_divided_otherwise() -> None:
    spec = spec_of("attend full score softcap(cap = 2) normalize softmax1 scale 0.5")
    for m, n in ((7, 16), (33, 20)):
        parts = tensors(m, n)
        q, k, v = parts
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        exps = (2 * torch.tanh(q @ k.transpose(-1, -2) * 0.5 / 2)).exp()
        expected = exps / (1 + exps.sum(-1, keepdim=True)) @ v
        assert torch.allclose(spec.compile()(*parts), expected)


# --- where the queries start ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 40])
def test_queries_that_come_later_are_rows_of_a_call_with_all(count: int) -> None:
    spec = spec_of("attend window(radius = 4) | where((q + k) % 7 == 0) | columns(last(2))")
    module, (q, k, v) = spec.compile(), tensors(60, 23)
    whole = module(q, k, v)
    for start in range(0, 60, count):
        part = module(q[:, :, start : start + count], k, v, query_start=start)
        assert torch.allclose(part, whole[:, :, start : start + count])
    far = module(q[:, :, :count], k, v, query_start=10**6)
    pairs = [[(i + j) % 7 == 0 or j >= 21 for j in range(23)] for i in range(10**6, 10**6 + count)]
    assert torch.allclose(far, dense([q[:, :, :count], k, v], torch.tensor(pairs))[0])
    held = module.pairs(q[:, :, :count], k, query_start=10**6)
    assert torch.equal(held, torch.tensor(pairs).expand(2, HEADS, -1, -1))


@pytest.mark.parametrize(
    ("body", "start", "error", "why"),
    [
        ("cross attend where(q < m)", 3, ValueError, "reads m, the number of all queries"),
        ("cross attend rows(last(2))", 3, ValueError, "which a call that starts at query 3"),
        ("cross attend full", -1, ValueError, "at least 0, got -1"),
        ("cross attend full", 1.5, TypeError, "an integer, got float"),
        ("cross attend full", True, TypeError, "an integer, got a boolean"),
        ("attend full", 3, ValueError, "`a` has one sequence"),
    ],
)
def test_a_start_that_means_nothing_is_refused(
    body: str, start: Any, error: type[Exception], why: str
) -> None:
    module = parse(f"attention a {{ {body} }}").compile()
    q, k, v = tensors(5, 5)
    for call in (
        lambda: module(q, k, v, query_start=start),
        lambda: module.pairs(q, k, query_start=start),
    ):
        with pytest.raises(error, match=why):
            call()
    assert module(q, k, v, query_start=0).shape == (2, HEADS, 5, WIDTH - 2)


def test_more_queries_than_keys_are_for_two_sequences_alone() -> None:
    with pytest.raises(ValueError, match="n_q is at most n_k"):
        parse("attention a { attend full }").compile()(*tensors(5, 3))


# --- inputs and choices ---------------------------------------------------------------------------


def graph_pairs(m: int, n: int) -> torch.Tensor:
    """`window(radius = 2)`."""
    return torch.from_numpy(abs(np.arange(m)[:, None] - np.arange(n)) <= 2)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 16), (33, 20), (130, 257)])
def test_inputs_have_the_length_of_the_keys(m: int, n: int) -> None:
    marked, count = torch.rand(2, n) > 0.7, torch.randint(0, n + 1, (2,))
    module = spec_of("input x: tokens attend columns(x) | window(radius = 2)").compile()
    pairs = marked[:, None, None] | graph_pairs(m, n)
    for padding in (None, padding_of(n)):
        given = {"inputs": {"x": marked}, "key_padding_mask": padding}
        assert_computes(module, tensors(m, n), pairs, **given)
    module = spec_of("input x: length attend prefix(x) & where(k % 2 == 0)").compile()
    pairs = (torch.arange(n) < count[:, None, None, None]) & (torch.arange(n) % 2 == 0)
    assert_computes(module, tensors(m, n), pairs, inputs={"x": count})
    module = spec_of("input x: tokens attend columns(x)").compile()
    with pytest.raises(ValueError, match=rf"must have the shape \[2, {n}\]"):
        module(*tensors(m, n), inputs={"x": torch.zeros(2, n + 1, dtype=torch.bool)})


@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 16), (33, 20), (130, 257)])
def test_choices_made_elsewhere(m: int, n: int) -> None:
    module = spec_of("input x: choices(size = 4) attend chosen(x) | window(radius = 2)").compile()
    lists = torch.randint(-1, -(-n // 4), (2, HEADS, m, 3))
    chosen = (lists[..., None] == torch.arange(n) // 4).any(-2)
    for padding in (None, padding_of(n)):
        given = {"inputs": {"x": lists}, "key_padding_mask": padding}
        assert_computes(module, tensors(m, n), chosen | graph_pairs(m, n), **given)
    with pytest.raises(ValueError, match=f"must name key blocks 0 … {-(-n // 4) - 1}"):
        module(*tensors(m, n), inputs={"x": torch.full_like(lists, -(-n // 4))})


def ranked(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row that are not -inf, the first of equal ones."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    taken = order.values[..., :count] > -torch.inf
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order.indices[..., :count], taken)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 16), (33, 20), (130, 257)])
@pytest.mark.parametrize("left", [0, 3])
def test_the_best_keys_and_blocks(m: int, n: int, left: int) -> None:
    parts, at = tensors(m, n), torch.arange(n)
    padding = padding_of(n) & (at >= min(left, n - 1))
    padding[:, -1] = True
    q, k = (x.detach().float() for x in parts[:2])
    scores = (torch.unflatten(q, 1, (KEY_HEADS, -1)) @ k[:, :, None].mT).mean(2)
    scores = scores.repeat_interleave(HEADS // KEY_HEADS, 1)
    seen = padding[:, None, None]
    keys = ranked(scores.masked_fill(~seen, -torch.inf), 5)
    assert_computes(
        spec_of("attend topk(keys = 5)").compile(), parts, keys, key_padding_mask=padding
    )
    near = graph_pairs(m, n)
    keys = ranked(scores.masked_fill(~(seen & near), -torch.inf), 2)
    module = spec_of("attend topk(keys = 2, within = window(radius = 2))").compile()
    assert_computes(module, parts, keys, key_padding_mask=padding)
    # blocks of four are counted from the first real key of each sample
    blocks = (at - padding.int().argmax(-1)[:, None]).div(4, rounding_mode="floor")
    number = torch.arange(-(-n // 4))
    real = (blocks[:, None] == number[:, None]) & padding[:, None]
    sums = torch.einsum("bhmn,bjn->bhmj", scores, real.float())
    means = sums / real.sum(-1).clamp_min(1)[:, None, None]
    taken = ranked(means.masked_fill(~real.any(-1)[:, None, None], -torch.inf), 2)
    pairs = torch.einsum("bhmj,bjn->bhmn", taken.float(), real.float()) > 0
    module = spec_of("attend topk(blocks = 2, size = 4, queries = 1)").compile()
    assert torch.equal(module.pairs(q, k, key_padding_mask=padding), pairs)
    assert_computes(module, parts, pairs, key_padding_mask=padding)


# --- mechanisms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism",
    [
        *("linear()", "favor(features = 16)", "rfa(features = 8)", "taylor()", "efficient()"),
        *("rbf(features = 16)", "linformer(rank = 4)"),
    ],
)
def test_mechanisms_read_another_sequence(mechanism: str) -> None:
    """Each query by itself is a call of one query within one sequence."""
    two = spec_of(f"attend {mechanism}").compile(head_size=WIDTH).double()
    one = parse(f"attention a {{ attend {mechanism} }}").compile(head_size=WIDTH).double()
    one.load_state_dict(two.state_dict())
    for m, n in ((1, 1), (7, 16), (33, 20)):
        parts = [*tensors(m, n)[:2], torch.randn(2, KEY_HEADS, n, WIDTH, dtype=torch.float64)]
        for padding in (None, padding_of(n) | (torch.arange(n) == 0)):
            q, k, v = parts
            given = {"key_padding_mask": padding}
            rows = [one(q[:, :, i : i + 1], k, v, **given) for i in range(m)]
            expected, out = torch.cat(rows, 2), two(q, k, v, **given)
            assert torch.allclose(out, expected)
            grad = torch.randn_like(out)
            both = [torch.autograd.grad(x, (q, k), grad) for x in (out, expected)]
            assert all(torch.allclose(x, y) for x, y in zip(*both, strict=True))
    for m, n in ((0, 5), (5, 0)):
        assert not two(*tensors(m, n)[:2], tensors(m, n)[1]).any()


def test_heads_of_graphs_and_mechanisms_side_by_side() -> None:
    text = "heads 4 attend window(radius = 2) head 1, 2 { attend linear() }"
    module, mixed = spec_of("attend linear()").compile(), spec_of(text).compile()
    for m, n in ((7, 16), (33, 20)):
        parts = tensors(m, n)
        out = mixed(*parts)
        assert torch.allclose(out[:, [0, 3]], dense(parts, graph_pairs(m, n))[0][:, [0, 3]])
        assert torch.allclose(out[:, 1:3], module(*parts)[:, 1:3])


# --- every way in ---------------------------------------------------------------------------------

PLAIN = "attend window(radius = 3) | where((q + k) % 7 == 0)"


def test_one_graph_serves_all_lengths() -> None:
    module = spec_of(PLAIN).compile()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for (m, n), start in product(((9, 20), (20, 9)), (0, 3)):
        parts = tensors(m, n)
        outs = [each(*parts, query_start=start) for each in (compiled, module)]
        assert torch.allclose(*outs)
        grads = [torch.autograd.grad(out.sum(), parts) for out in outs]
        assert all(torch.allclose(x, y) for x, y in zip(*grads, strict=True))


def test_what_looks_at_operators_sees_one() -> None:
    module, parts = spec_of(PLAIN).compile(), tensors(30, 10)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in parts]
        assert module(*fake).shape == (2, HEADS, 30, WIDTH - 2)
    with FlopCounterMode(display=False) as counter:
        module(*parts)
    assert counter.get_total_flops() > 0
    mapped = torch.func.vmap(lambda q, k, v: module(q, k, v, query_start=2))
    whole = mapped(*(torch.stack([x, 2 * x]) for x in parts))
    assert torch.allclose(whole[1], module(*(2 * x for x in parts), query_start=2))
    few = [x[:1, :, :4, :2].detach().requires_grad_() for x in parts]
    assert torch.autograd.gradcheck(lambda *x: module(*x, query_start=2), few, **ALONG)


def test_an_emitted_module_is_the_same_computation() -> None:
    spec = spec_of(PLAIN)
    names: dict[str, Any] = {}
    exec(compile(spec.emit(), "emitted", "exec"), names)
    parts = tensors(12, 7)
    out = names["A"]()(*parts, query_start=5)
    assert torch.equal(out, spec.compile()(*parts, query_start=5))
    # the class of one sequence has no such argument
    assert "query_start" not in parse("attention a { attend full }").emit()


def test_what_has_one_sequence_refuses_two() -> None:
    spec, (q, k, v) = spec_of(PLAIN), tensors(5, 5)
    with pytest.raises(ValueError, match="with the next queries and their `query_start`"):
        spec.compile().step(q, k, v)
    with pytest.raises(ValueError, match="a layer of self-attention has one"):
        attnspec.SelfAttention(spec, 16, 2)


def test_what_is_kept_of_one_start_is_not_taken_for_another() -> None:
    module, (q, k, v) = spec_of("attend self").compile(), tensors(20, 40)
    for start in (0, 7, 20, 0):
        at = torch.arange(20)[:, None] + start == torch.arange(40)
        assert torch.allclose(module(q, k, v, query_start=start), dense([q, k, v], at)[0])


@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 16), (33, 20), (130, 257)])
@pytest.mark.parametrize(
    ("graph", "held"),
    [
        ("where(t(k) <= 3) & where(q + k < 20)", lambda t, q, k: (t[k] <= 3) & (q + k < 20)),
        ("transpose(where(t(q) != 2))", lambda t, q, k: (t[k] != 2) & (q >= 0)),
    ],
)
def test_predicates_read_numbers_of_the_keys(graph: str, held: Any, m: int, n: int) -> None:
    spec = spec_of(f"input t: numbers attend {graph}")
    numbers = torch.arange(n) % 5
    at = torch.arange(m)[:, None], torch.arange(n)[None]
    pairs = held(numbers, *at)
    assert np.array_equal(spec.mask(n, m=m, inputs={"t": numbers.numpy()}), pairs.numpy())
    parts = tensors(m, n)
    inputs = {"t": numbers.expand(2, n)}
    out, _ = dense(parts, pairs)
    torch.testing.assert_close(spec.compile()(*parts, inputs=inputs), out)


@pytest.mark.parametrize("graph", ["where(t(q) <= t(k))", "transpose(where(t(k) <= 3))"])
def test_numbers_of_the_keys_are_not_looked_up_at_queries(graph: str) -> None:
    with pytest.raises(attnspec.SpecError, match="belongs to the keys"):
        spec_of(f"input t: numbers attend {graph}")


@pytest.mark.parametrize("start", [2**31, 2**62, 2**70])
def test_a_first_query_is_a_number_that_a_position_may_have(start: int) -> None:
    module = parse("attention c { cross attend window(radius = 2) }").compile()
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"query_start must be at most 2\*\*31 - 1"):
        module(q, q, q, query_start=start)


@pytest.mark.parametrize("graph", ["full", "window(radius = 5)", "columns(first(8))"])
def test_more_queries_than_keys_cost_no_square_of_them(graph: str) -> None:
    m, n, d = 512, 64, 8
    module = parse(f"attention a {{ cross attend {graph} }}").compile()
    q, k = torch.randn(1, 2, m, d), torch.randn(1, 2, n, d)
    module(q, k, k)
    with FlopCounterMode(display=False) as counted:
        module(q, k, k)
    # scores and their products with values, two operations for each number
    assert counted.get_total_flops() <= 4 * 2 * m * n * d


@pytest.mark.parametrize("backend", ["auto", "dense", "rows"])
@pytest.mark.parametrize(
    "graph",
    [
        "~(where(x(k) > q) & where(q > k))",
        "where(not (q - k < 3 and x(k) < q))",
        "full - (where(x(k) in {1, 5, 7}) | window(radius = 2))",
        "shift(where(x(k) <= q or q * 2 < k), by = 2)",
        "~transpose(transpose(columns(t) & where(q > k)))",
    ],
)
def test_operators_over_inputs_and_positions(graph: str, backend: str) -> None:
    spec = attnspec.parse(f"attention a {{ cross input x: ids input t: tokens attend {graph} }}")
    q, k = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 12, 16)
    x = torch.stack([torch.arange(12).flip(0), torch.arange(12)])
    read = {name: {"x": x, "t": x % 5 == 1}[name] for name in spec.inputs}
    masks = [
        spec.mask(12, m=5, inputs={name: given[at].numpy() for name, given in read.items()})
        for at in (0, 1)
    ]
    mask = torch.from_numpy(np.stack(masks))[:, None]
    meant = F.scaled_dot_product_attention(q, k, k, attn_mask=mask).nan_to_num()
    found = spec.compile(backend=backend)(q, k, k, inputs=read)
    torch.testing.assert_close(found, meant * mask.any(-1, keepdim=True), rtol=1e-4, atol=1e-5)

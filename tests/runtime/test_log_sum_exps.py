"""`return_lse`: log-sum-exps of every backend against the definition, with gradients, and what they
are for, merging outputs over other keys."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import ALONG, BACKEND_NAMES, GRAPHS, module_of, spec_of, tensors
from sweeps import checkered

from attnspec import parse
from attnspec.backends.factored.definitions import undivided
from attnspec.lower.lower import Binder, stand_ins
from attnspec.runtime import CompiledAttention

NAMES = ("full", "causal", "strided", "random blocks", "empty rows", "where")


def scores_of(
    module: CompiledAttention, q: torch.Tensor, k: torch.Tensor, held: torch.Tensor
) -> torch.Tensor:
    """Scaled scores [B, H, n_q, n_k], -inf where a pair is not `held`."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~held, -math.inf)


def finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > -math.inf, x, 0.0)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_the_definition(name: str, backend: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
    for n, n_q, padded in ((1, 1, False), (17, 17, True), (130, 130, True), (130, 40, False)):
        q, k, v = given = tensors(2, 4, n_q, n, key_heads=2, out_size=5)
        padding = None
        held = torch.stack([torch.from_numpy(spec.mask(n, head=h)) for h in range(4)])
        held = held[None, :, n - n_q :].expand(2, -1, -1, -1)
        if padded:
            padding = torch.ones(2, n, dtype=torch.bool)
            padding[0, : n // 3] = False
            held = held & padding[:, None, None]
        out, lse = module(q, k, v, key_padding_mask=padding, return_lse=True)
        exact = torch.logsumexp(scores_of(module, q, k, held), -1)
        empty = ~held.any(-1)
        assert lse.shape == (2, 4, n_q)
        assert ((lse == -math.inf) == empty).all()
        torch.testing.assert_close(finite(lse), finite(exact), rtol=0, atol=1e-12)
        plain = module(q, k, v, key_padding_mask=padding)
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
        # what asks for both outputs, and for the log-sum-exps alone
        weights = torch.softmax(scores_of(module, q, k, held), -1).nan_to_num(0.0)
        other = weights @ v.repeat_interleave(2, 1)
        for both in (True, False):
            losses = [
                finite(sums).sin().sum() + (found.square().sum() if both else 0.0)
                for found, sums in ((out, lse), (other, exact))
            ]
            wanted = given if both else given[:2]
            found, right = (torch.autograd.grad(x, wanted, retain_graph=True) for x in losses)
            for mine, meant in zip(found, right, strict=True):
                torch.testing.assert_close(mine, meant.nan_to_num(0.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_outputs_over_disjoint_keys_are_merged_by_them(backend: str) -> None:
    q, k, v = tensors(2, 2, 150, 150)
    whole = module_of("causal attend full", backend)(q, k, v)
    near, far = (
        module_of(f"causal attend {body}", backend)
        for body in ("window(before = 20, after = 0)", "full - window(before = 20, after = 0)")
    )
    (o1, l1), (o2, l2) = (each(q, k, v, return_lse=True) for each in (near, far))
    share = torch.sigmoid(l2 - l1)[..., None]
    torch.testing.assert_close(torch.lerp(o1, o2, share), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "bands", "tiles", "dense"])
def test_softmax1_counts_its_own_logit(backend: str) -> None:
    module = module_of("causal attend window(before = 9, after = 0) normalize softmax1", backend)
    q, k, v = tensors(1, 2, 40, 40)
    _, lse = module(q, k, v, return_lse=True)
    at = torch.arange(40)
    held = (at <= at[:, None]) & (at >= at[:, None] - 9)
    scores = torch.cat([scores_of(module, q, k, held), q.new_zeros(1, 2, 40, 1)], -1)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "bands", "tiles", "dense"])
@pytest.mark.parametrize(("normalize", "empty"), [("softmax", -math.inf), ("softmax1", 0.0)])
def test_many_rows_in_succession_have_no_key(backend: str, normalize: str, empty: float) -> None:
    body = f"attend window(radius = 3) - rows(first(200)) normalize {normalize}"
    out, lse = module_of(body, backend)(*tensors(1, 2, 230, 230), return_lse=True)
    assert (lse[:, :, :200] == empty).all()
    assert not out[:, :, :200].any()
    assert (lse[:, :, 200:].abs() > 0).all()


@pytest.mark.parametrize("backend", ["torch", "bands"])
def test_they_can_be_differentiated_twice(backend: str) -> None:
    module = module_of("attend window(radius = 4) - self", backend)
    q, k, v = tensors(1, 1, 9, 9, size=3)

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module(*given, return_lse=True)
        return out, lse

    assert torch.autograd.gradgradcheck(both, (q, k, v), **ALONG)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_they_are_float32_at_least(dtype: torch.dtype) -> None:
    module = parse("attention a { attend window(radius = 9) }").compile()
    q, k, v = (x.detach().to(dtype) for x in tensors(1, 2, 70, 70))
    out, lse = module(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    "body",
    [
        "attend linear(feature = identity)",
        "attend linear(normalize = none)",
        "attend window(radius = 3) + favor(features = 8, kind = trig)",
        "attend rfa(features = 8)",
        "attend efficient()",
        "attend linformer(rank = 4)",
        "causal heads 2 attend full head 1 { attend rfa(features = 8) }",
        "attend full normalize sigmoid",
        "attend full normalize relu",
        "input d: ids attend same(d) normalize relu",
    ],
)
def test_weights_without_a_positive_denominator_have_none(body: str) -> None:
    module = parse(f"attention a {{ {body} }}").compile()
    inputs = {"d": torch.zeros(2, 30, dtype=torch.int64)} if "input" in body else None
    for batch, queries in ((2, 30), (2, 0), (0, 30)):
        given = None if inputs is None else {"d": inputs["d"][:batch]}
        with pytest.raises(ValueError, match="log-sum-exps, and what `a` divides by has no"):
            module(*tensors(batch, 2, queries, 30), inputs=given, return_lse=True)


@pytest.mark.parametrize(("batch", "n"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("normalize", ["relu", "sigmoid", "softmax", "softmax1"])
def test_an_empty_call_is_refused_like_others(normalize: str, batch: int, n: int) -> None:
    graph = "window(radius = 2)"
    module = parse(f"attention a {{ causal attend {graph} normalize {normalize} }}").compile()
    given = tensors(batch, 2, n, n)
    for call in (module, module.step):
        if normalize in ("relu", "sigmoid"):
            with pytest.raises(ValueError, match="log-sum-exps, and what `a` divides by has no"):
                call(*given, return_lse=True)
        else:
            call(*given, return_lse=True)
        call(*given)


MECHANISMS = (
    *("linear()", "linear(feature = relu)", "linear(feature = exp)", "taylor()", "rbf()"),
    *("favor(features = 16)", "favor(features = 16, kind = relu)", "taylor(order = 2)"),
)


def denominators(
    body: str, q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None
) -> torch.Tensor:
    """Their logarithms by the definitions [B, H, n_q], one sample and head after the other."""
    program = parse(f"attention a {{ {body} }}").program
    rows = q.new_empty(0)
    for sample in range(len(q)):
        real = slice(None) if padding is None else padding[sample]
        for head in range(q.shape[1]):
            keys = k[sample, head * k.shape[1] // q.shape[1]]
            binder = Binder(program, stand_ins(program))
            ((work, _),) = binder.works(0, q.shape[1], q.shape[2], len(keys))
            weights = undivided(work, head, q[sample, head], keys, {})[:, real]
            total = weights.sum(-1)
            alone = not work.hybrid and getattr(work.mechanism, "name", "") == "linear"
            log = torch.log(total + 1e-6 if alone else total)
            rows = torch.cat([rows, log.masked_fill(total == 0, -math.inf)])
    return rows.view(q.shape[:3])


@pytest.mark.parametrize(
    ("mechanism", "graph", "causal"),
    checkered(MECHANISMS, ["", "window(before = 3, after = 0) + "], ["", "causal "]),
)
def test_mechanisms_have_those_of_their_denominators(
    mechanism: str, graph: str, causal: str
) -> None:
    body = f"{causal}attend {graph}{mechanism}"
    module = parse(f"attention a {{ {body} }}").compile()
    for n, n_q, padded in ((1, 1, False), (70, 70, True), (70, 9, False)):
        q, k, v = given = tensors(2, 2, n_q, n, key_heads=1, out_size=5)
        padding = None
        if padded:
            padding = torch.ones(2, n, dtype=torch.bool)
            padding[0, : n // 3] = False
        out, lse = module(q, k, v, key_padding_mask=padding, return_lse=True)
        exact = denominators(body, q, k, padding)
        assert (lse == -math.inf).equal(exact == -math.inf)
        torch.testing.assert_close(finite(lse), finite(exact), rtol=0, atol=1e-9)
        plain = module(q, k, v, key_padding_mask=padding)
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-9)
        losses = [
            (finite(lse).sin().sum() + out.square().sum()),
            (finite(exact).sin().sum() + plain.square().sum()),
        ]
        mine, meant = (torch.autograd.grad(loss, given) for loss in losses)
        for a, b in zip(mine, meant, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("body", ["linear()", "favor(features = 64)", "taylor(order = 2)"])
def test_mechanisms_over_disjoint_keys_are_merged_by_them(body: str) -> None:
    module = parse(f"attention a {{ cross attend {body} }}").compile()
    q, k, v = tensors(2, 2, 20, 90)
    whole = module(q, k, v)
    (o1, l1), (o2, l2) = (
        module(q, k[:, :, part], v[:, :, part], return_lse=True)
        for part in (slice(33), slice(33, None))
    )
    merged = torch.lerp(o1, o2, torch.sigmoid(l2 - l1)[..., None])
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "body", ["linear()", "favor()", "window(before = 3, after = 0) + linear()"]
)
def test_steps_of_mechanisms_have_those_of_the_whole(body: str) -> None:
    module = parse(f"attention a {{ causal attend {body} }}").compile()
    q, k, v = tensors(2, 2, 80, 80)
    _, whole = module(q, k, v, return_lse=True)
    rows, state = [], None
    for part in (slice(1), slice(1, 70), slice(70, 80)):
        mine = q[:, :, part], k[:, :, part], v[:, :, part]
        (_, lse), state = module.step(*mine, state, return_lse=True)
        rows.append(lse)
    torch.testing.assert_close(torch.cat(rows, 2), whole, rtol=0, atol=1e-9)


def test_documents_beside_a_mechanism_have_them_for_each_sample() -> None:
    body = "input d: ids causal attend same(d) + linear()"
    module = parse(f"attention a {{ {body} }}").compile()
    q, k, v = tensors(2, 1, 40, 40)
    documents = (torch.arange(40) // torch.tensor([[7], [19]])).contiguous()
    out, lse = module(q, k, v, inputs={"d": documents}, return_lse=True)
    torch.testing.assert_close(out, module(q, k, v, inputs={"d": documents}), rtol=0, atol=1e-9)
    phi = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
    held = (documents[:, None, :, None] == documents[:, None, None]).tril()
    exact = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    weights = torch.where(held, exact, phi[0] @ phi[1].mT).tril()
    torch.testing.assert_close(lse, weights.sum(-1).log(), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_one_graph_has_those_of_a_mechanism() -> None:
    module = parse("attention a { causal attend window(before = 3, after = 0) + linear() }")
    own = module.compile()
    q, k, v = tensors(1, 2, 40, 40)
    traced = torch.compile(own, fullgraph=True, dynamic=True, backend="aot_eager")
    for found, meant in zip(
        traced(q, k, v, return_lse=True), own(q, k, v, return_lse=True), strict=True
    ):
        torch.testing.assert_close(found, meant, rtol=0, atol=1e-12)


def test_nothing_has_minus_infinity() -> None:
    module = parse("attention a { attend full }").compile()
    for n_q, n_k in ((0, 0), (0, 5), (3, 0)):
        q, k, v = tensors(1, 2, n_q, n_k)
        if n_q <= n_k:
            out, lse = module(q, k, v, return_lse=True)
            assert (out.shape, lse.shape) == ((1, 2, n_q, 8), (1, 2, n_q))


def test_packed_documents_have_them_for_each_sample() -> None:
    module = parse("attention a { input d: ids causal attend same(d) }").compile()
    documents = torch.arange(90).div(20, rounding_mode="floor").expand(2, -1).clone()
    documents[1, 50:] = 9
    q, k, v = tensors(2, 2, 90, 90)
    _, lse = module(q, k, v, inputs={"d": documents}, return_lse=True)
    held = (documents[:, :, None] == documents[:, None]) & torch.ones(90, 90).tril().bool()
    exact = scores_of(module, q, k, held[:, None]).logsumexp(-1)
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-12)

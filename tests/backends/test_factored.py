"""Mechanisms that are sums of features: equal to their formulas, however they are computed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_checks import ALONG, check_transforms
from kernel_texts import CASES, FULL

from attnspec.backends.factored.definitions import defined
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.lower.work import Call, Work
from attnspec.runtime import CompiledAttention
from attnspec.spec import parse

every_case = pytest.mark.parametrize(("text", "causal"), CASES)
every_causal = pytest.mark.parametrize("text", [text for text, causal in CASES if causal])


@cache
def module_of(text: str, causal: bool) -> CompiledAttention:
    spec = parse(f"attention a {{ {'causal' if causal else ''} attend {text} }}")
    module = spec.compile(head_size=6).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return module


def tensors(
    batch: int, heads: int, keys: int, n_q: int, n_k: int, kind: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(n_k + heads)
    shapes = ((heads, n_q, 6), (keys, n_k, 6), (keys, n_k, 4))
    return [
        torch.randn(batch, *shape, generator=source, dtype=torch.float64).to(kind).requires_grad_()
        for shape in shapes
    ]


def work_of(module: CompiledAttention, n_q: int, n_k: int) -> Work:
    """The work of all heads, which are alike."""
    ((work, _),) = module.engine.binder.works(0, 1, n_q, n_k)
    return work


def kernel_of(module: CompiledAttention, heads: int, n: int) -> FeatureKernel:
    (group,) = module.engine.prepare(0, heads, heads, n, n, "cpu").groups
    assert isinstance(group.kernel, FeatureKernel)
    return group.kernel


def tables_of(module: CompiledAttention) -> dict[str, torch.Tensor]:
    work = work_of(module, 1, 1)
    return {part: module.get_parameter(name)[0] for part, name in module.engine.tables_of(work)}


def written_out(
    module: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The output by the definition, head by head and sample by sample."""
    work = work_of(module, q.shape[2], k.shape[2])
    tables = {name: table[0] for name, table in tables_of(module).items()}
    repeat = q.shape[1] // k.shape[1]
    return torch.stack(
        [
            torch.stack(
                [
                    defined(
                        work, head, q[b, head], k[b, head // repeat], v[b, head // repeat], tables
                    )
                    for head in range(q.shape[1])
                ]
            )
            for b in range(len(q))
        ]
    )


def with_gradients(
    module: CompiledAttention, out: torch.Tensor, given: list[torch.Tensor]
) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=source, dtype=torch.float64).to(out.dtype)
    leaves = [*given, *module.parameters()]
    return [out, *torch.autograd.grad(out, leaves, grad, materialize_grads=True, allow_unused=True)]


def assert_near(
    found: list[torch.Tensor], meant: list[torch.Tensor], error: float = 1e-8, where: str = ""
) -> None:
    for one, other in zip(found, meant, strict=True):
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(
            one / scale, other / scale, rtol=error, atol=error, msg=lambda why: f"{where} {why}"
        )


# --- what is computed ----------------------------------------------------------------------------


SHAPES = [
    *[(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 130, 130), (2, 2, 5, 131), (2, 2, 70, 71)],
]
"""Heads, heads of keys, queries, keys."""


@every_case
def test_values_and_gradients_are_those_of_the_formula(text: str, causal: bool) -> None:
    module = module_of(text, causal)
    for shape in SHAPES:
        given = tensors(2, *shape)
        found = with_gradients(module, module(*given), given)
        meant = with_gradients(module, written_out(module, *given), given)
        assert_near(found, meant, where=str(shape))


@every_case
def test_padding_is_as_if_it_were_not_there(text: str, causal: bool) -> None:
    module = module_of(text, causal)
    q, k, v = tensors(2, 2, 2, 90, 90)
    padding = torch.rand(2, 90, generator=torch.Generator().manual_seed(2)) < 0.6
    padding[0, :40] = False
    out = module(q, k, v, key_padding_mask=padding)
    for b in range(2):
        real = padding[b].nonzero()[:, 0]
        alone = module(*(x[b : b + 1, :, real] for x in (q, k, v)))
        torch.testing.assert_close(out[b : b + 1, :, real], alone, rtol=1e-9, atol=1e-9)
    # what stands in padding changes no bit, and has no gradient
    changed = [x.detach().clone() for x in (k, v)]
    for x in changed:
        x.transpose(1, 2)[~padding] = 3.0
    again = module(q, *changed, key_padding_mask=padding)
    assert torch.equal(out, again)
    for grad in torch.autograd.grad(out.sum(), (k, v)):
        assert not grad.transpose(1, 2)[~padding].any()


@every_case
def test_without_a_real_key_the_output_is_zero(text: str, causal: bool) -> None:
    module = module_of(text, causal)
    given = tensors(2, 2, 2, 9, 9)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1] = False
    out, *grads = with_gradients(module, module(*given, key_padding_mask=padding), given)
    assert not out[1].any()
    for grad in grads:
        assert torch.isfinite(grad).all()


@every_case
def test_nothing_gives_nothing(text: str, causal: bool) -> None:
    module = module_of(text, causal)
    for batch, n_q, n_k in ((2, 0, 0), (0, 3, 3), (1, 0, 4)):
        given = tensors(batch, 2, 2, n_q, n_k)
        out = module(*given)
        assert out.shape == (batch, 2, n_q, 4)
        out.sum().backward()


@pytest.mark.parametrize(
    ("text", "causal", "chunk", "block"),
    [
        # two of the four take turns
        pytest.param(*case, *sizes, marks=() if i == at % 2 else pytest.mark.slow)
        for at, case in enumerate(case for case in CASES if case[0] not in FULL)
        for i, sizes in enumerate([(1, 1), (7, 64), (16, 1 << 12), (64, 1 << 9)])
    ],
)
def test_chunks_and_blocks_change_nothing(text: str, causal: bool, chunk: int, block: int) -> None:
    module = module_of(text, causal)
    kernel = kernel_of(module, 2, 40)
    call = Call(tables=tables_of(module))
    results = []
    for how in (kernel.how, replace(kernel.how, chunk=chunk, block=block)):
        q, k, v = given = tensors(1, 2, 2, 33, 40)
        out = replace(kernel, how=how)(q, k, v, call)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    assert_near(results[1], results[0], 1e-10)


@every_causal
def test_no_bit_of_a_row_depends_on_the_future(text: str) -> None:
    module = module_of(text, True)
    for kind in (torch.float64, torch.float32):
        q, k, v = (x.detach() for x in tensors(1, 2, 2, 200, 200, kind))
        with torch.no_grad():
            before = module.to(kind)(q, k, v)
            for at in (1, 63, 64, 150):
                later = [x.clone() for x in (q, k, v)]
                for x in later:
                    x[:, :, at:] = 20 * torch.randn_like(x[:, :, at:])
                assert torch.equal(module(*later)[:, :, :at], before[:, :, :at])
        module.double()


# --- numbers at the edge -------------------------------------------------------------------------


# sums of weights of either sign may cancel, whatever they are kept in
@pytest.mark.parametrize(
    ("text", "causal"), [case for case in CASES if not re.search("identity|trig|rfa|none", case[0])]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_kept_in_float32(text: str, causal: bool, kind: torch.dtype) -> None:
    module = module_of(text, causal)
    given = tensors(1, 2, 2, 150, 150, kind)
    wide = [x.detach().double().requires_grad_() for x in given]
    meant = module(*wide)
    found = module.float()(*given)
    module.double()
    assert found.dtype == kind
    error = 100 * torch.finfo(kind).eps
    torch.testing.assert_close(found.double(), meant, rtol=error, atol=error)


@pytest.mark.parametrize(
    "text",
    [
        "linear()",
        "linear(feature = exp)",
        "favor(features = 24)",
        "favor(features = 24, kind = hyperbolic)",
        "favor(features = 24, kind = trig)",
        "rbf(features = 24)",
        "rfa(features = 12)",
        "rfa(features = 12, gated = true)",
        "taylor()",
        "taylor(order = 2)",
    ],
)
@pytest.mark.parametrize("size", [0.0, 1e-30, 60.0, -60.0, 300.0])
def test_no_input_divides_by_zero(text: str, size: float) -> None:
    module = module_of(text, True).float()
    given = [x.detach().float() for x in tensors(1, 2, 2, 70, 70)]
    q, k, v = (x.requires_grad_() for x in (given[0].abs() * size, given[1].abs() * size, given[2]))
    out = module(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    module.double()
    for x in (out, *grads):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("text", ["rfa(features = 12)", "taylor()"])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_rows_of_zeros_have_no_direction_and_no_gradient(text: str, kind: torch.dtype) -> None:
    given = [x.detach().to(kind) for x in tensors(1, 2, 2, 12, 12)]
    for x in given[:2]:
        x[:, :, ::3] = 0
    q, k, v = (x.requires_grad_() for x in given)
    out = module_of(text, True).float()(q, k, v)
    module_of(text, True).double()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for grad in grads:
        assert torch.isfinite(grad).all()
    for grad in grads[:2]:
        assert not grad[:, :, ::3].any()
        assert grad[:, :, 4].all()


def test_elu1_does_not_round_to_zero() -> None:
    module = module_of("linear()", False).float()
    q, k = (torch.full((1, 1, 3, 6), -9.0) for _ in range(2))
    k[:, :, 1] = -20.0
    v = torch.eye(3)[None, None]
    weights = module(q.double(), k.double(), v.double())[0, 0, 0]
    found = module(q, k, v)[0, 0, 0]
    module.double()
    assert found[1] > 0
    torch.testing.assert_close(found.double(), weights, rtol=1e-5, atol=0)


def test_stabilised_features_agree_with_float64_far_from_zero() -> None:
    module = module_of("favor(features = 24)", True)
    q, k, v = (x.detach() for x in tensors(1, 2, 2, 100, 100))
    # keys whose features grow by many powers of ten along the sequence
    k = k * torch.linspace(0.1, 12.0, 100).double()[:, None]
    meant = module(q, k, v)
    found = module.float()(q.float(), k.float(), v.float())
    module.double()
    torch.testing.assert_close(found.double(), meant, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("scale", [None, -1.5, 2.5])
@pytest.mark.parametrize(
    ("quotient", "divisors"),
    [
        (Quotient(added=0.5), [-1.5, 0.4, 0.5, 0.6, 2.5]),
        (Quotient(least=0.5, signed=True), [-2.0, -0.5, 0.5, 0.5, 2.0]),
        (Quotient(least=0.5, added=0.3), [-1.7, 0.5, 0.5, 0.5, 2.3]),
        (Quotient(least=0.25, floor=0.5, signed=True), [0.5, 0.5, 0.5, 0.5, 2.0]),
        (Quotient(floor=0.5, added=0.3), [0.5, 0.5, 0.5, 0.5, 2.3]),
        (Quotient(divides=False), [1.0] * 5),
    ],
)
def test_what_sums_are_divided_by(
    quotient: Quotient, divisors: list[float], scale: float | None
) -> None:
    """By hand, of sums that stand for a multiple too; and the gradient is that of the division."""
    total = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0], dtype=torch.float64)
    meant = torch.stack([total + 1, total], -1)
    log = None if scale is None else torch.full_like(total, scale)
    sums = (meant if log is None else meant * torch.exp(-log)[:, None]).requires_grad_()
    out = quotient.of(sums, log)
    torch.testing.assert_close(out[:, 0], meant[:, 0] / torch.tensor(divisors).double())
    (wanted,) = torch.autograd.grad(out, sums, torch.ones_like(out))
    found = quotient.gradient(torch.ones_like(out), out, sums[:, -1], log)
    torch.testing.assert_close(found, wanted)


def test_dropout_is_refused() -> None:
    given = tensors(1, 2, 2, 5, 5)
    for text in ("linear()", "efficient()"):
        with pytest.raises(ValueError, match="has no weights to drop"):
            module_of(text, False)(*given, dropout_p=0.1)


# --- other ways to run ---------------------------------------------------------------------------

SOME = [("linear()", False), ("linear()", True), ("favor(features = 24)", True), CASES[-1]]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("text", "causal"), SOME)
def test_transforms_take_plain_operations(text: str, causal: bool) -> None:
    q, k, v = (x.detach() for x in tensors(3, 2, 2, 70, 70))
    check_transforms(module_of(text, causal), q, k, v)


@pytest.mark.parametrize(("text", "causal"), SOME)
def test_second_derivatives(text: str, causal: bool) -> None:
    module = module_of(text, causal)
    given = tensors(1, 1, 1, 4, 5)
    assert torch.autograd.gradgradcheck(lambda *x: module(*x), given, **ALONG)


def test_every_sum_of_features_is_tried() -> None:
    tried = {text.partition("(")[0] for text, _ in CASES}
    # `efficient` has weights of pairs, and is made of whole matrices
    assert tried == {each.name for each in MECHANISMS if each.sums} | {"efficient"}

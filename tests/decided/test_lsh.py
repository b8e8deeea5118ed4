"""`lsh` against plain loops: pairs, weights of rounds, shared keys, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle.decided import Sample, lsh
from torch.utils.checkpoint import checkpoint

import attnspec
from attnspec.backends.decided.hashes import farthest
from attnspec.lower.lower import stand_ins, works_of
from attnspec.runtime.layer import SelfAttention
from attnspec.runtime.module import CompiledAttention

H, N = 2, 27


def module_of(body: str) -> CompiledAttention:
    return attnspec.parse(f"attention a {{ {body} }}").compile()


def rounds_of(
    h: torch.Tensor, k: torch.Tensor, n_q: int, padding: torch.Tensor, causal: bool, **how: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs bool [B, H, n_q, n], and those of rounds [R, B, H, n_q, n]."""
    batch, heads, turns, n = h.shape
    held = torch.zeros(batch, heads, n_q, n, dtype=torch.bool)
    each = torch.zeros(turns, batch, heads, n_q, n, dtype=torch.bool)
    for b, head in itertools.product(range(batch), range(heads)):
        wide = k[b].numpy()
        sample = Sample(wide[:, n - n_q :], wide, padding[b].tolist(), causal, 1.0)
        pairs, rounds = lsh(h[b, head].numpy(), sample, **how)  # type: ignore[arg-type]
        for q, key in pairs:
            held[b, head, q - n + n_q, key] = True
        for turn, some in enumerate(rounds):
            for q, key in some:
                each[turn, b, head, q - n + n_q, key] = True
    return held, each


WAYS = [
    (cut, look, masked, shared)
    for cut, look, masked, shared in itertools.product(
        ("order", "bucket"), (0, 1, 2), (True, False), (True, False)
    )
    if masked or cut == "order"
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("cut", "look", "masked", "shared"), WAYS)
def test_pairs_of_given_buckets(
    cut: str, look: int, masked: bool, shared: bool, causal: bool
) -> None:
    words = f"cut = {cut}, look = {look}, bucket_mask = {str(masked).lower()}"
    words += f", share_qk = {str(shared).lower()}"
    module = module_of(
        f"input h: buckets {'causal' if causal else ''} attend lsh(h, chunk = 4, {words})"
    )
    generator = torch.Generator().manual_seed(look)
    for n, n_q in ((N, N), (N, 5), (1, 1)):
        h = torch.randint(-2, 3, (2, H, 3, n), generator=generator)
        padding = torch.rand(2, n, generator=generator) < 0.8
        k = torch.randn(2, H, n, 4)
        found = module.pairs(k[:, :, n - n_q :], k, inputs={"h": h}, key_padding_mask=padding)
        wanted, _ = rounds_of(
            h, k, n_q, padding, causal, chunk=4, look=look, cut=cut, masked=masked, shared=shared
        )
        assert torch.equal(found, wanted)


def unit(x: torch.Tensor) -> torch.Tensor:
    size = x.norm(dim=-1, keepdim=True)
    return x / torch.where(size > 0, size, 1.0)


@pytest.mark.parametrize("multiplicity", [False, True])
@pytest.mark.parametrize("combine", ["union", "mean"])
@pytest.mark.parametrize("scale", ["root", "unit"])
def test_values_and_gradients(multiplicity: bool, combine: str, scale: str) -> None:
    words = f"multiplicity = {str(multiplicity).lower()}, combine = {combine}, scale = {scale}"
    module = module_of(f"input h: buckets causal attend lsh(h, chunk = 4, {words})")
    h = torch.randint(0, 3, (2, H, 3, N))
    x = torch.randn(2, H, N, 6, dtype=torch.float64)
    x[0, 0, 3] = 0.0
    x.requires_grad_()
    v = torch.randn(2, H, N, 6, dtype=torch.float64, requires_grad=True)
    real = torch.ones(2, N, dtype=torch.bool)
    held, rounds = rounds_of(
        h, x.detach(), N, real, True, chunk=4, look=1, cut="order", masked=True, shared=True
    )
    scores = x @ unit(x).transpose(-1, -2) * (1.0 if scale == "unit" else 6**-0.5)

    def softmax(where: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        raw = torch.exp(scores) * where * times
        total = raw.sum(-1, keepdim=True)
        return raw / torch.where(total > 0, total, 1.0)

    if combine == "mean":
        each = torch.stack([softmax(where, torch.tensor(1.0)) for where in rounds])
        count = rounds.any(-1, keepdim=True).sum(0)
        weights = each.sum(0) / count.clamp_min(1)
    else:
        weights = softmax(held, rounds.sum(0) if multiplicity else torch.tensor(1.0))
    outs = module(x, x, v, inputs={"h": h}), weights @ v
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    upstream = torch.randn_like(outs[0])
    found, wanted = (torch.autograd.grad(out, (x, v), upstream) for out in outs)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-11


def test_pairs_of_another_graph_are_weighed_once_beside_counted_ones() -> None:
    words = "lsh(h, chunk = 4, multiplicity = true, share_qk = false) | window(radius = 2)"
    module = module_of(f"input h: buckets attend {words}")
    h, (q, k, v) = torch.randint(0, 3, (2, H, 3, N)), torch.randn(3, 2, H, N, 6).double()
    real = torch.ones(2, N, dtype=torch.bool)
    held, rounds = rounds_of(
        h, k, N, real, False, chunk=4, look=1, cut="order", masked=True, shared=False
    )
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 2
    raw = torch.exp(q @ k.transpose(-1, -2) * 6**-0.5) * torch.where(held, rounds.sum(0), near)
    assert torch.allclose(module(q, k, v, inputs={"h": h}), raw / raw.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize(
    ("given", "known"), [("attend lsh(", False), ("input h: buckets attend lsh(h,", True)]
)
def test_buckets_are_given_or_found(given: str, known: bool) -> None:
    program = attnspec.parse(f"attention a {{ {given} chunk = 4) }}").program
    ((work, _),) = works_of(program, 0, 1, 8, 8, stand_ins(program))
    assert [leaf.given_choice for leaf in work.decided] == [known]


def test_merged_rounds_are_one_softmax_with_multiplicity() -> None:
    whole = module_of("input h: buckets attend lsh(h, chunk = 4, multiplicity = true)")
    one = module_of("input h: buckets attend lsh(h, chunk = 4)")
    h = torch.arange(2).view(1, 1, 1, 2).expand(1, 1, 3, 2)[..., :1].expand(1, 1, 3, 8)
    x, v = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    # the same round three times weighs all pairs alike
    assert torch.allclose(whole(x, x, v, inputs={"h": h}), one(x, x, v, inputs={"h": h}), atol=1e-6)


def test_buckets_are_those_of_rotations() -> None:
    module = module_of("heads 2 layers 2 attend lsh(buckets = 6, rounds = 2, chunk = 4, seed = 5)")
    x = torch.randn(1, 2, 11, 8)
    x[0, 0, 2] = 0.0
    for layer in (0, 1):
        found = module.choices(x, x, layer=layer)["lsh"]["buckets"]
        assert found.shape == (1, 2, 2, 11)
        assert found.min() >= 0
        assert found.max() < 6
        assert found[0, 0, :, 2].tolist() == [0, 0]
        assert torch.equal(found, module.choices(3 * x, 3 * x, layer=layer)["lsh"]["buckets"])
    first, second = (module.choices(x, x, layer=layer)["lsh"]["buckets"] for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("same", [True, False])
def test_what_is_no_number_is_in_bucket_0(same: bool) -> None:
    module = module_of("attend lsh(buckets = 6, rounds = 3, chunk = 4)")
    x = torch.randn(1, 2, 11, 8)
    plain = module.choices(x, x)["lsh"]["buckets"]
    x[0, 1, 4, 2] = torch.nan
    # keys are the queries there, too
    found = module.choices(x, x if same else x.clone())["lsh"]["buckets"]
    assert found[0, 1, :, 4].tolist() == [0, 0, 0]
    plain[0, 1, :, 4] = 0
    assert torch.equal(found, plain)


@pytest.mark.parametrize(("m", "c"), [(1, 1), (7, 1), (5, 3), (300, 128)])
def test_the_farthest_is_the_first_of_several(m: int, c: int) -> None:
    y = torch.randint(-3, 4, (2, c, m)).float()
    y[:, :, 0] = 0.0
    wanted = torch.cat([y, -y], 1).argmax(1)
    assert torch.equal(farthest(y), wanted)


@pytest.mark.parametrize(("n", "count"), [(1, 2), (64, 2), (95, 2), (97, 4), (512, 16)])
def test_the_number_of_buckets_follows_n(n: int, count: int) -> None:
    from attnspec.graphs.patterns.lsh import Lsh

    assert Lsh().buckets_at(n) == count


def test_near_vectors_share_a_bucket() -> None:
    module = module_of("attend lsh(buckets = 16, rounds = 4, chunk = 64, hash = hyperplanes)")
    x = torch.randn(1, 1, 64, 16)
    x[0, 0, 32:] = x[0, 0, :32] * 2
    held = module.pairs(x, x)[0, 0]
    assert held[torch.arange(32, 64), torch.arange(32)].all()


@pytest.mark.parametrize("body", ["attend lsh()", "input h: buckets attend lsh(h)"])
def test_keys_must_be_the_queries(body: str) -> None:
    module = module_of(body)
    x = torch.randn(1, 2, 9, 4)
    inputs = {"h": torch.zeros(1, 1, 1, 9, dtype=torch.int64)} if "h:" in body else None
    with pytest.raises(ValueError, match="k is not q"):
        module(x, x + 1, x, inputs=inputs)
    with pytest.raises(ValueError, match="as many heads as q"):
        module(x, x[:, :1], x[:, :1], inputs=inputs)
    assert module(x[:, :, 5:], x, x, inputs=inputs).shape == (1, 2, 4, 4)


def test_chunks_cut_within_buckets_are_causal() -> None:
    module = module_of("input h: buckets causal attend lsh(h, chunk = 3, cut = bucket)")
    x = torch.randn(1, 1, 24, 4)
    h = torch.randint(0, 4, (1, 1, 2, 24))
    before = module.pairs(x, x, inputs={"h": h})
    h[..., -1] = (h[..., -1] + 1) % 4
    after = module.pairs(x, x, inputs={"h": h})
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])


def test_one_giant_bucket_and_empty_ones() -> None:
    module = module_of("causal attend lsh(buckets = 64, rounds = 2, chunk = 4)")
    x = torch.ones(1, 1, 40, 4)
    held = module.pairs(x, x)[0, 0]
    at = torch.arange(40)
    back = at[:, None] // 4 - at // 4
    wanted = (back >= 0) & (back <= 1) & (at < at[:, None])
    wanted[0, 0] = True
    assert torch.equal(held, wanted)


def test_buckets_cut_apart_go_on_step_by_step() -> None:
    module = module_of("causal attend lsh(buckets = 4, rounds = 3, chunk = 2, cut = bucket)")
    x, v = (torch.randn(2, 2, 17, 6, dtype=torch.float64) for _ in range(2))
    whole = module(x, x, v)
    state, outs = None, []
    for at in (slice(0, 1), slice(1, 7), slice(7, 17)):
        out, state = module.step(x[:, :, at], x[:, :, at], v[:, :, at], state)
        outs.append(out)
    assert (torch.cat(outs, 2) - whole).abs().max() < 1e-12


def test_a_layer_projects_queries_and_keys_at_once() -> None:
    spec = attnspec.parse("attention a { heads 4 attend lsh(chunk = 4) head 3 { attend self } }")
    layer = SelfAttention(spec, 16, 4)
    assert layer.shared == (0, 1, 2)
    assert layer.read == "qkv"
    x = torch.randn(2, 9, 16, requires_grad=True)
    layer(x).square().sum().backward()
    alone = SelfAttention(attnspec.parse("attention a { attend lsh(chunk = 4) }"), 16, 4)
    assert alone.read == "qv"
    assert alone(x).shape == x.shape


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("words", ["", ", hash = hyperplanes", ", combine = mean"])
def test_what_is_computed_again_sees_the_same_rotations(words: str, reentrant: bool) -> None:
    module = module_of(f"heads 2 causal attend lsh(buckets = 8, rounds = 3, chunk = 4{words})")
    x, v = (torch.randn(2, 2, N, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    drawn: list[torch.Tensor] = []

    def attend(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # what a seed of torch could change, if rotations went by it
        torch.manual_seed(len(drawn))
        drawn.append(module.choices(x.detach(), x.detach())["lsh"]["buckets"])
        out: torch.Tensor = module(x, x, v)
        return out

    grads = []
    for again in (False, True):
        out = attend(x, v)
        if again:
            out = checkpoint(attend, x, v, use_reentrant=reentrant, preserve_rng_state=False)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert v.grad is not None
        grads.append((x.grad, v.grad))
        x.grad = v.grad = None
    assert len(drawn) == 4
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


# torch scripts its own forward derivatives
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("words", ["", ", share_qk = false"])
def test_forward_mode_of_hashed_vectors(words: str) -> None:
    """It agrees with the gradient: buckets are constants of both."""
    module = attnspec.parse(f"attention a {{ attend lsh(buckets = 8{words}) }}").compile()
    x, along, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    found: torch.Tensor = torch.func.jvp(lambda x: module(x, x, v), (x,), (along,))[1]
    leaf = x.clone().requires_grad_()
    above = torch.randn_like(v)
    (grad,) = torch.autograd.grad(module(leaf, leaf, v), leaf, above)
    torch.testing.assert_close((found * above).sum(), (grad * along).sum())

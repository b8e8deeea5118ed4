"""What choices say of odd tensors, and what they keep and learn; that pairs, values, gradients and
steps are those of plain loops is a view."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from oracle.decided import nearest, unit
from population import spec_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def module_of(body: str) -> Any:
    return spec_of(body).compile(head_size=6).double()


def tensors(n: int, n_q: int | None = None, heads: int = 2) -> list[Tensor]:
    shapes = (heads, n if n_q is None else n_q, 6), (2, n, 6), (2, n, 5)
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(2, *x, generator=generator, dtype=torch.float64) for x in shapes]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_ties_go_to_the_lower_position_and_nan_is_last(kind: torch.dtype) -> None:
    module = module_of("attend topk(keys = 3)")
    q, k = torch.zeros(1, 1, 9, 4, dtype=kind), torch.ones(1, 1, 9, 4, dtype=kind)
    assert module.pairs(q, k)[0, 0].nonzero()[:, 1].view(9, 3).tolist() == [[0, 1, 2]] * 9
    k[0, 0, 4] = torch.nan
    k[0, 0, 1] = -1
    assert module.pairs(q + 1, k)[0, 0, 0].nonzero().flatten().tolist() == [0, 2, 3]
    assert module.pairs(q[:, :, :5] + 1, k[:, :, :5])[0, 0, 0].sum() == 3


@pytest.mark.parametrize("width", [4, 40, 1200])
def test_infinities_are_no_candidates(width: int) -> None:
    """However many there are to choose from, in which case groups of them are compared first."""
    module = module_of("input s: scores attend topk(keys = 3, score = s)")
    q, scores = torch.zeros(1, 1, width, 2), torch.full((width, width), -torch.inf)
    first = [torch.nan, 1.0, -3e38, -torch.inf], [-torch.inf] * 4, [0.0, -0.0, 0.0, 0.0]
    some = torch.tensor([*first, [torch.inf, torch.nan, torch.nan, 5.0]])
    last = width // 4 * torch.arange(4)
    scores[:4, last] = some
    found = module.pairs(q, q, inputs={"s": scores[None, None]})[0, 0]
    chosen = [[i for i in range(4) if row[last[i]]] for row in found[:4]]
    assert chosen == [[0, 1, 2], [], [0, 1, 2], [0, 1, 3]]
    assert found[:4].sum().item() == 9


@pytest.mark.parametrize(("width", "budget"), [(37, 2), (401, 5), (1024, 9)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_of_many_are_the_first_in_order(width: int, budget: int, ties: bool) -> None:
    module = module_of(f"input s: scores attend topk(keys = {budget}, score = s)")
    scores, q = torch.randn(8, width), torch.zeros(1, 1, width, 2)
    scores = (scores * 2).round() if ties else scores
    found = module.pairs(q[:, :, -8:], q, inputs={"s": scores[None, None]})[0, 0]
    order = scores.sort(descending=True, stable=True).indices[:, :budget]
    assert torch.equal(found, torch.zeros_like(found).scatter(1, order, True))


def test_an_infinite_key_bounds_its_block() -> None:
    module = spec_of("attend topk(blocks = 1, size = 4, queries = 1, score = bound)").compile()
    k = torch.zeros(1, 1, 12, 2)
    k[..., 4:8, 1], k[..., 9, :] = 1.0, torch.inf
    read = module.pairs(torch.tensor([-1.0, 1.0]).expand(1, 1, 12, 2), k)
    assert read[0, 0, 0].nonzero()[:, 0].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("backend", ["dense", "tables"])
@pytest.mark.parametrize(
    "graph",
    [
        *(f"topk(blocks = 2, size = 4, score = {score})" for score in ("mean", "bound", "max")),
        "sinkhorn(size = 4, cut = 2)",
    ],
)
def test_padding_alone_chooses_nothing(graph: str, backend: str) -> None:
    module = spec_of(f"attend {graph}").compile(backend, head_size=4)
    q = torch.ones(2, 1, 9, 4, requires_grad=True)
    for real in (torch.zeros(2, 9, dtype=torch.bool), torch.tensor([[False], [True]]).repeat(1, 9)):
        out = module(q, q, q, key_padding_mask=real)
        assert not out[~real.any(1)].any()
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_buckets_go_by_direction_layer_and_head() -> None:
    module = module_of("heads 2 layers 2 attend lsh(buckets = 6, rounds = 3, chunk = 4, seed = 5)")
    x = torch.randn(1, 1, 40, 6).repeat(1, 2, 1, 1)
    x[0, :, 2] = 0.0
    first, second = (module.choices(x, x, layer=at)["lsh"]["buckets"] for at in (0, 1))
    assert first.shape == (1, 2, 3, 40)
    assert {*first.flatten().tolist()} == {*range(6)}
    assert not first[0, :, :, 2].any()
    assert torch.equal(first, module.choices(3 * x, 3 * x)["lsh"]["buckets"])
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1])


@pytest.mark.parametrize("same", [True, False])
def test_nan_hashes_to_bucket_0(same: bool) -> None:
    module = module_of("attend lsh(buckets = 6, rounds = 3, chunk = 4)")
    x = torch.randn(1, 2, 11, 6)
    plain = module.choices(x, x)["lsh"]["buckets"]
    x[0, 1, 4, 2] = torch.nan
    # keys are the queries there, too
    found = module.choices(x, x if same else x.clone())["lsh"]["buckets"]
    plain[0, 1, :, 4] = 0
    assert torch.equal(found, plain)


def test_codes_of_many_buckets_and_chunks_take_more_than_two_bytes() -> None:
    at, x = torch.arange(300), torch.ones(1, 1, 300, 6)
    h = at.flip(0)[None, None, None] // 2 * 4000
    module = module_of("input h: buckets attend lsh(h, chunk = 1, look = 2, share_qk = false)")
    pairs = module.pairs(x, x, inputs={"h": h})[0, 0]
    assert torch.equal(pairs, (at[:, None] // 2 == at // 2) & (at[:, None] >= at))


@pytest.mark.parametrize("body", ["attend lsh()", "input h: buckets attend lsh(h)"])
def test_keys_must_be_the_queries(body: str) -> None:
    module, x = module_of(body), torch.randn(1, 2, 9, 6)
    inputs = {"h": torch.zeros(1, 1, 1, 9, dtype=torch.int64)} if "h:" in body else None
    for k, why in (
        (x + 1, "q must be k or the last rows of k"),
        (x[:, :1], "as many heads as q"),
    ):
        with pytest.raises(ValueError, match=why):
            module(x, k, k, inputs=inputs)
    assert module(x[:, :, 5:], x, x, inputs=inputs).shape == (1, 2, 4, 6)


# torch scripts its own forward derivatives
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("words", ["", ", share_qk = false"])
def test_forward_mode_agrees_with_the_gradient(words: str) -> None:
    module = module_of(f"attend lsh(buckets = 8{words})")
    x, along, v = (torch.randn(1, 2, 40, 6, dtype=torch.float64) for _ in range(3))
    found: Tensor = torch.func.jvp(lambda x: module(x, x, v), (x,), (along,))[1]
    leaf, above = x.clone().requires_grad_(), torch.randn_like(v)
    (grad,) = torch.autograd.grad(module(leaf, leaf, v), leaf, above)
    torch.testing.assert_close((found * above).sum(), (grad * along).sum())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "heads 2 causal attend lsh(buckets = 8, rounds = 3, chunk = 4)",
        "attend lsh(buckets = 8, rounds = 3, chunk = 4, hash = hyperplanes, combine = mean)",
        "attend cluster(count = 3, assign = balanced)",
    ],
)
def test_recomputed_choices_are_the_same(body: str, reentrant: bool) -> None:
    """Whatever torch's own numbers are, and though what is kept moves in training."""
    x, _, v = (x.requires_grad_() for x in tensors(27))
    grads = []
    for again in (False, True):
        module, turns = module_of(body).train(), iter((1, 2))

        def attend(x: Tensor, v: Tensor, module: Any = module, turns: Any = turns) -> Any:
            torch.manual_seed(next(turns))
            return module(x, x, v)

        more: dict[str, Any] = {"use_reentrant": reentrant, "preserve_rng_state": False}
        out = checkpoint(attend, x, v, **more) if again else attend(x, v)
        out.square().sum().backward()
        grads.append((x.grad, v.grad))
        x.grad = v.grad = None
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", ["", "heads 2 "])
def test_each_centroid_moves_towards_its_own_tokens_in_training(heads: str, padded: bool) -> None:
    # more centroids than tokens are nearest to: one that nothing is near stays where it is
    module = module_of(f"{heads}attend cluster(count = 30, assign = balanced)").float()
    q, k, v = (x.float() for x in tensors(23, 4))
    k, v = k[:, :1], v[:, :1]
    real = torch.arange(23).expand(2, 23) >= torch.tensor([[7], [0]])
    real = real if padded else torch.ones_like(real)
    before = module.state_dict()["cluster_centroids"][0].numpy().copy()
    module.eval()(q, k, v, key_padding_mask=real)
    assert np.array_equal(module.state_dict()["cluster_centroids"][0].numpy(), before)
    module.train()(q, k, v, key_padding_mask=real)
    total = np.zeros(before.shape)
    for b in range(2):
        for head in range(2):
            mine = real[b].numpy()
            both = unit(np.concatenate([q[b, head].numpy()[mine[-4:]], k[b, 0].numpy()[mine]]))
            row = head % len(total)
            for point, label in zip(both, nearest(both, unit(before[row])), strict=True):
                total[row, label] += point
    some = (total != 0).any(-1, keepdims=True)
    assert some.any()
    assert not some.all()
    wanted = np.where(some, 0.999 * unit(before) + 0.001 * unit(total), unit(before))
    after = module.state_dict()["cluster_centroids"][0].numpy()
    assert np.abs(after - wanted).max() < 1e-6
    loaded = module_of(f"{heads}attend cluster(count = 30, assign = balanced)").float()
    loaded.load_state_dict(module.state_dict())
    for other in (loaded, copy.deepcopy(module)):
        assert torch.equal(other.eval().pairs(q, k), module.eval().pairs(q, k))


@pytest.mark.parametrize(("samples", "n"), [(0, 5), (2, 0)])
def test_where_nothing_is_there_nothing_is_decided(samples: int, n: int) -> None:
    module, q = module_of("attend cluster(count = 5)"), torch.zeros(samples, 2, n, 6)
    assert module.pairs(q, q).shape == (samples, 2, n, n)
    assert list(module.choices(q, q)["cluster"]) == ["heads"]
    assert module(q, q, q).shape == q.shape


@pytest.mark.parametrize("causal", ["", "causal "])
def test_blocks_that_are_matched_are_those_of_real_keys(causal: str) -> None:
    # all samples are padded on the left: real keys are five blocks, all keys six
    module = module_of(causal + "attend sinkhorn(size = 4, max_blocks = 5)")
    torch.nn.init.normal_(module.get_parameter("sinkhorn_sort"), std=0.3)
    q, k, v = tensors(23)
    padding = (torch.arange(23) >= 3).expand(2, 23)
    found = module(q, k, v, key_padding_mask=padding)[:, :, 3:]
    torch.testing.assert_close(found, module(*(x[:, :, 3:] for x in (q, k, v))), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="max_blocks = 5 blocks, and 23 keys are 6 blocks of 4"):
        module(q, k, v)


@pytest.mark.parametrize("argument", ["within = window(radius = 5)", "always = self"])
def test_choices_within_a_graph_go_through_transforms(argument: str) -> None:
    module = spec_of(f"attend topk(keys = 3, {argument})").compile()
    q, k, v = torch.randn(3, 1, 1, 20, 8)
    found = torch.func.grad(lambda x: module(x, k, v).sum())(q)
    (meant,) = torch.autograd.grad(module(q.requires_grad_(), k, v).sum(), q)
    torch.testing.assert_close(found, meant)

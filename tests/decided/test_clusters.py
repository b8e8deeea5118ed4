"""`cluster` and `sinkhorn` against plain loops: pairs, values, gradients, what is learned."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from oracle.decided import kmeans, nearest, sinkhorn, unit

import attnspec
from attnspec.backends.decided import cluster
from attnspec.backends.decided.choice import part_of
from attnspec.backends.decided.sinkhorn import MatchChoice
from attnspec.graphs.counter_rng import CENTROIDS, Stream, distinct
from attnspec.runtime.module import CompiledAttention

N = 23
LEFT = torch.arange(N).expand(2, N) >= torch.tensor([[7], [0]])
HOLES = (torch.arange(N) % 5 != 2).expand(2, N)


def module_of(body: str) -> CompiledAttention:
    return attnspec.parse(f"attention a {{ {body} }}").compile()


def tensors(n_q: int = N, heads: int = 2, key_heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n_q)
    shapes = (heads, n_q, 6), (key_heads, N, 6), (key_heads, N, 5)
    return tuple(
        torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


@pytest.mark.parametrize("padding", [None, LEFT, HOLES])
@pytest.mark.parametrize("n_q", [N, 4])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_clusters_are_those_of_plain_loops(
    padding: torch.Tensor | None, n_q: int, count: int
) -> None:
    module = module_of(f"attend cluster(count = {count}, seed = 3)")
    q, k, _ = tensors(n_q, 2, 1)
    q[0, 0, 1] = 0.0
    found = module.pairs(q, k, key_padding_mask=padding)
    for b in range(2):
        real = np.ones(N, bool) if padding is None else padding[b].numpy()
        for head in range(2):
            both = np.concatenate([q[b, head].numpy()[real[N - n_q :]], k[b, 0].numpy()[real]])
            stream = Stream(3, CENTROIDS, 0, head)
            drawn = distinct(stream, np.zeros(1, np.int64), np.array([len(both)]), min(count, N))
            labels = np.array(kmeans(both, both[drawn[0][drawn[0] >= 0]]))
            own, other = np.full(n_q, -1), np.full(N, -2)
            cut = int(real[N - n_q :].sum())
            own[real[N - n_q :]], other[real] = labels[:cut], labels[cut:]
            assert np.array_equal(found[b, head].numpy(), own[:, None] == other)


def test_given_clusters_are_labels() -> None:
    one = module_of("input l: ids causal attend cluster(l)")
    other = module_of("input l: ids causal attend same(l)")
    q, k, v = tensors(9)
    labels = torch.randint(-3, 3, (2, N))
    inputs = {"l": labels}
    assert torch.equal(one.pairs(q, k, inputs=inputs), other.pairs(q, k, inputs=inputs))
    assert (one(q, k, v, inputs=inputs) - other(q, k, v, inputs=inputs)).abs().max() < 1e-12


def test_balanced_clusters_take_as_many_of_each() -> None:
    module = module_of("heads 2 attend cluster(count = 4, assign = balanced, seed = 1)")
    q, k, _ = tensors()
    held = module.pairs(q, k)
    centroids = module.learned("cluster_centroids").double()
    for b in range(2):
        for head in range(2):
            wanted = np.zeros((N, N), bool)
            for centroid in unit(centroids[0, head].numpy()):
                taken = []
                for x in (q[b, head], k[b, head]):
                    near = unit(x.numpy()) @ centroid
                    taken.append(np.argsort(-near, kind="stable")[:6])
                wanted[np.ix_(*taken)] = True
            assert np.array_equal(held[b, head].numpy(), wanted)


def test_centroids_move_in_training_alone_and_are_kept() -> None:
    module = module_of("attend cluster(count = 3, assign = balanced)")
    q, k, v = (x.float() for x in tensors(heads=2))
    module.eval()(q, k, v)
    before = module.state_dict()["cluster_centroids"].clone()
    module(q, k, v)
    assert torch.equal(before, module.state_dict()["cluster_centroids"])
    module.train()(q, k, v)
    after = module.state_dict()["cluster_centroids"]
    points = unit(np.concatenate([q.numpy(), k.numpy()], 2).reshape(-1, 6))
    labels = np.array(nearest(points, unit(before[0, 0].numpy())))
    wanted = [
        0.999 * c + 0.001 * unit(points[labels == j].sum(0))
        for j, c in enumerate(unit(before[0, 0].numpy()))
    ]
    assert np.abs(after[0, 0].numpy() - np.stack(wanted)).max() < 1e-6
    loaded = module_of("attend cluster(count = 3, assign = balanced)")
    loaded.load_state_dict(module.state_dict())
    assert torch.equal(loaded.eval().pairs(q, k), module.eval().pairs(q, k))
    assert torch.equal(copy.deepcopy(module).pairs(q, k), module.pairs(q, k))


@pytest.mark.parametrize("padding", [None, LEFT, HOLES])
@pytest.mark.parametrize("heads", ["", "heads 2 "])
def test_each_centroid_moves_towards_its_own_tokens(
    heads: str, padding: torch.Tensor | None
) -> None:
    # more centroids than tokens are nearest to: one that nothing is near stays where it is
    module = module_of(f"{heads}attend cluster(count = 30, assign = balanced)").train()
    q, k, v = (x.float() for x in tensors(4, key_heads=1))
    module.eval()(q, k, v)
    before = module.state_dict()["cluster_centroids"][0].numpy().copy()
    module.train()(q, k, v, key_padding_mask=padding)
    after = module.state_dict()["cluster_centroids"][0].numpy()
    real = np.ones((2, N), bool) if padding is None else padding.numpy()
    total = np.zeros(before.shape)
    for b in range(2):
        for head in range(2):
            both = np.concatenate([q[b, head].numpy()[real[b, -4:]], k[b, 0].numpy()[real[b]]])
            row = head % len(total)
            for point, label in zip(
                unit(both), nearest(unit(both), unit(before[row])), strict=True
            ):
                total[row, label] += point
    some = (total != 0).any(-1, keepdims=True)
    assert some.any()
    assert not some.all()
    wanted = np.where(some, 0.999 * unit(before) + 0.001 * unit(total), unit(before))
    assert np.abs(after - wanted).max() < 1e-6


def test_what_does_not_exist_is_nearest_to_nothing() -> None:
    points = cluster.Points.of(torch.eye(3)[None, None], torch.ones(1, 3, dtype=torch.bool), True)
    exists = torch.tensor([[[True, True, False]]])
    for there, wanted in ((exists, [0, 1, 0]), (torch.ones_like(exists), [0, 1, 2])):
        assert cluster.nearest(points, points.at, there).tolist() == [[wanted]]


@pytest.mark.parametrize(("samples", "n"), [(0, 5), (2, 0)])
def test_where_nothing_is_there_nothing_is_decided(samples: int, n: int) -> None:
    module = module_of("attend cluster(count = 5)")
    q = k = torch.zeros(samples, 2, n, 6)
    assert module.pairs(q, k).shape == (samples, 2, n, n)
    assert list(module.choices(q, k)["cluster"]) == ["heads"]
    assert module(q, k, k).shape == (samples, 2, n, 6)


def test_checkpoint_computes_again_what_was_computed() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    grads = []
    for again in (False, True):
        module = module_of("attend cluster(count = 3, assign = balanced)").train()
        if again:
            out = torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False)
        else:
            out = module(q, k, v)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_means_of_queries_attend_for_their_clusters() -> None:
    module = module_of("attend cluster(count = 4, of = q)")
    q, k, v = (x.requires_grad_() for x in tensors())
    labels = module.choices(q, k)["cluster"]["queries"]
    assert module.pairs(q, k).all()
    mean = torch.stack(
        [
            torch.stack([q[b, h, labels[b, h] == labels[b, h, i]].mean(0) for i in range(N)])
            for b in range(2)
            for h in range(2)
        ]
    ).view_as(q)
    outs = module(q, k, v), torch.softmax(mean @ k.transpose(-1, -2) * 6**-0.5, -1) @ v
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    upstream = torch.randn_like(outs[0])
    found, wanted = (torch.autograd.grad(out, (q, k, v), upstream) for out in outs)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-12


def matched(
    held: np.ndarray,
    module: CompiledAttention,
    real: np.ndarray,
    k: np.ndarray,
    cut: int | None,
    causal: bool,
    head: int,
) -> None:
    sort = module.get_parameter("sinkhorn_sort")[0, head].detach().double().numpy()
    _, rows = sinkhorn(k, real.tolist(), sort, 4, 7, 0.75, causal)
    start = int(np.argmax(real))
    block = (np.arange(N) - start) // 4
    for q in range(N):
        for key in range(N):
            if cut is None:
                read = block[q] == block[key] or (block[q] >= 0 and rows[block[q]] == block[key])
            else:
                read = block[key] in rows[:cut]
            read = read and block[q] >= 0 and block[key] >= 0 and real[key]
            assert held[q, key] == (read and (not causal or key <= q))


@pytest.mark.parametrize("padding", [None, LEFT, HOLES])
@pytest.mark.parametrize(("cut", "causal"), [(None, False), (None, True), (2, False), (9, False)])
def test_matched_blocks(padding: torch.Tensor | None, cut: int | None, causal: bool) -> None:
    words = "" if cut is None else f", cut = {cut}"
    module = module_of(
        f"heads 2 {'causal' if causal else ''} attend sinkhorn(size = 4, max_blocks = 9{words})"
    )
    q, k, _ = tensors()
    module.make_parameters(6, 5)
    torch.nn.init.normal_(module.get_parameter("sinkhorn_sort"), std=0.3)
    held = module.pairs(q, k, key_padding_mask=padding)
    for b in range(2):
        real = np.ones(N, bool) if padding is None else padding[b].numpy()
        for head in range(2):
            matched(held[b, head].numpy(), module, real, k[b, head].numpy(), cut, causal, head)


def test_the_factor_trains_the_matrix() -> None:
    module = module_of("attend sinkhorn(size = 4, max_blocks = 6)").double()
    q, k, v = (x.requires_grad_() for x in tensors())
    module.make_parameters(6, 5)
    sort = module.get_parameter("sinkhorn_sort")
    torch.nn.init.normal_(sort, std=0.3)
    sums = torch.nn.functional.pad(k, (0, 0, 0, 1)).view(2, 2, 6, 4, 6).sum(3)
    found = sums @ sort[0] / 0.75
    for _ in range(7):
        found = found - found.logsumexp(-1, keepdim=True)
        found = found - found.logsumexp(-2, keepdim=True)
    balance = found.exp()
    best, where = balance.max(-1)
    block = torch.arange(N) // 4
    other = where[..., block][..., None] == block
    factor = torch.where(other, (1 + best - best.detach())[..., block][..., None], 1.0)
    scores = (q @ k.transpose(-1, -2) * 6**-0.5 * factor).masked_fill(
        ~(other | (block[:, None] == block)), -torch.inf
    )
    outs = module(q, k, v), (torch.softmax(scores, -1) * factor) @ v
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    upstream = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, (q, k, v, sort), upstream) for out in outs]
    assert grads[0][3].abs().max() > 1e-3
    for one, two in zip(*grads, strict=True):
        assert (one - two).abs().max() < 1e-11


def test_each_row_that_has_a_block_is_trained_by_it() -> None:
    matched = torch.tensor([[[1, 1, -1]]])
    weight = torch.tensor([[[1.0, 1.0, 1.0]]], requires_grad=True)
    choice = MatchChoice(matched, torch.tensor([2]), 3, 3, 11, 11, weight)
    q, k = torch.arange(11)[:, None], torch.arange(11)
    factor = choice.factor(q, k)
    assert torch.equal(factor, torch.ones(1, 1, 11, 11))
    reads = (k >= 5) & (k < 8)
    for key in range(11):
        (found,) = torch.autograd.grad(factor[0, 0, 4, key], weight, retain_graph=True)
        assert found.flatten().tolist() == ([1.0, 1.0, 0.0] if reads[key] else [0.0, 0.0, 0.0])
    held = choice.holds(q, k)[0, 0]
    assert torch.equal(held, (q >= 2) & reads)


def test_a_part_of_a_choice_has_its_samples_and_heads() -> None:
    both, shared = torch.arange(12).view(2, 3, 2), torch.arange(2).view(1, 1, 2)
    choice = MatchChoice(both, shared, 3, None, 6, 6)
    found = part_of({"a": (choice, 7)}, slice(1, 2), torch.tensor([2, 0]))
    part, number = found["a"]
    assert part.matched.tolist() == [[[10, 11], [6, 7]]]
    assert part.start.tolist() == [[[0, 1]]]
    assert (part.size, part.weight, number) == (3, None, 7)


def test_more_blocks_than_are_learned_for_are_refused() -> None:
    module = module_of("attend sinkhorn(size = 4, max_blocks = 5)")
    q, k, v = tensors()
    with pytest.raises(ValueError, match="max_blocks = 5 blocks, and 23 keys are 6 of 4"):
        module(q, k, v)


@pytest.mark.parametrize("causal", ["", "causal "])
def test_blocks_are_those_of_real_keys(causal: str) -> None:
    # all samples are padded on the left: real keys are five blocks, all keys six
    module = module_of(causal + "attend sinkhorn(size = 4, max_blocks = 5)").double()
    module.make_parameters(6, 5)
    torch.nn.init.normal_(module.get_parameter("sinkhorn_sort"), std=0.3)
    q, k, v = tensors()
    padding = (torch.arange(N) >= 3).expand(2, N)
    found = module(q, k, v, key_padding_mask=padding)[:, :, 3:]
    alone = module(*(x[:, :, 3:] for x in (q, k, v)))
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)

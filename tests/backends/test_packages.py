"""Ours against the packages that do the same: equal, or apart by what they are known to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_checks import learner_of, tensors, with_gradients
from population import spec_of
from torch import Tensor

from attnspec.backends.factored.directions import one_head
from attnspec.runtime import CompiledAttention

with warnings.catch_warnings():
    # it asks for versions in a way that Python 3.11 calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    performer: Any = import_module("performer_pytorch.performer_pytorch")
linformer: Any = import_module("linformer")
local_attention: Any = import_module("local_attention")
nystrom_attention: Any = import_module("nystrom_attention")

SIZE = 8

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def assert_same(ours: Attend, theirs: Attend, given: Sequence[Tensor]) -> None:
    """Both give the same output and the same gradients of q, k and v."""
    q, k, v = given
    found, meant = (with_gradients(attend(q, k, v), given) for attend in (ours, theirs))
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other)


def projection(features: int) -> Tensor:
    """The directions of `favor(seed = 3)` in its first head, in float64."""
    return torch.from_numpy(one_head(3, 0, 0, 0, features, SIZE, True))


def features_of(x: Tensor, is_query: bool, eps: float, count: int) -> Tensor:
    found: Tensor = performer.softmax_kernel(
        x, projection_matrix=projection(count), is_query=is_query, eps=eps
    )
    return found


@pytest.mark.parametrize("count", [1, 8, 21])
@pytest.mark.parametrize("n", [1, 7, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_favor_is_that_of_performer_pytorch(causal: bool, n: int, count: int) -> None:
    # without what it adds to each feature, which draws weights to their mean and lets a causal row
    # know how large later keys are
    sums = performer.causal_linear_attention_noncuda if causal else performer.linear_attention
    extra = {"eps": 0.0} if causal else {}

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = sums(
            features_of(q, True, 0.0, count), features_of(k, False, 0.0, count), v, **extra
        )
        return found

    ours = spec_of(f"{'causal' * causal} attend favor(features = {count}, seed = 3)").compile()
    assert_same(ours, theirs, tensors(2, 1, n, n, size=SIZE, out_size=5))


def test_performer_pytorch_as_it_is_comes_near() -> None:
    module = performer.FastAttention(SIZE, nb_features=32).double()
    module.projection_matrix.copy_(projection(32))
    given = tensors(2, 1, 50, 50)
    apart = spec_of("attend favor(features = 32, seed = 3)").compile()(*given) - module(*given)
    assert 1e-6 < apart.abs().max() < 0.1


def test_directions_are_orthogonal_in_the_blocks_of_performer_pytorch() -> None:
    theirs = performer.gaussian_orthogonal_random_matrix(21, SIZE).double()
    for rows in (theirs, projection(21)):
        product = rows @ rows.T
        for low in range(0, 21, SIZE):
            block = product[low : low + SIZE, low : low + SIZE]
            away = block - torch.diag(block.diagonal())
            assert away.abs().max() < 1e-5
        # blocks know nothing of each other
        assert product[:SIZE, SIZE : 2 * SIZE].abs().max() > 0.1


@pytest.mark.parametrize("n", [1, 9, 40])
def test_efficient_attention_is_that_of_performer_pytorch(n: int) -> None:
    theirs = performer.FastAttention(SIZE, no_projection=True)
    assert_same(spec_of("attend efficient()").compile(), theirs, tensors(2, 3, n, n))


def nystrom_pair(landmarks: int, width: int) -> tuple[CompiledAttention, torch.nn.Module]:
    """Ours and theirs, one head: their inverse starts from one norm of all heads and samples."""
    theirs = nystrom_attention.NystromAttention(
        SIZE, SIZE, 1, num_landmarks=landmarks, residual_conv_kernel=width
    ).double()
    theirs.to_qkv, theirs.to_out = torch.nn.Identity(), torch.nn.Identity()
    ours = learner_of(f"attend nystrom(landmarks = {landmarks}, conv = {width})", SIZE)
    with torch.no_grad():
        ours.get_parameter("nystrom_kernel").copy_(theirs.res_conv.weight.view(1, 1, width))
    return ours, theirs


@pytest.mark.parametrize(("n", "landmarks", "width"), [(48, 8, 5), (8, 1, 3), (60, 20, 33)])
def test_nystrom_is_that_of_nystrom_attention(n: int, landmarks: int, width: int) -> None:
    ours, theirs = nystrom_pair(landmarks, width)

    def attend(*given: Tensor) -> Tensor:
        found: Tensor = theirs(torch.cat([x[:, 0] for x in given], -1))
        return found[:, None]

    assert_same(ours, attend, tensors(1, 1, n, n))


def test_nystrom_attention_puts_zeros_before_a_length_that_does_not_divide() -> None:
    ours, theirs = nystrom_pair(8, 5)
    given = tensors(1, 1, 45, 45)
    found = theirs(torch.cat([x[:, 0] for x in given], -1))[:, None]
    longer = [torch.nn.functional.pad(x, (0, 0, 3, 0)) for x in given]
    torch.testing.assert_close(ours(*longer)[:, :, 3:], found)
    # our segments are uneven instead, and of what is there
    assert (ours(*given) - found).abs().max() > 1e-3


@pytest.mark.parametrize("share", ["key_value", "head"])
@pytest.mark.parametrize("n", [1, 21, 30])
def test_linformer_is_that_of_its_package(share: str, n: int) -> None:
    longest, rank, heads = 30, 6, 2
    theirs = linformer.LinformerSelfAttention(heads * SIZE, longest, k=rank, heads=heads).double()
    theirs.to_out = torch.nn.Identity()
    if share == "key_value":
        # its own option makes the values the keys
        theirs.proj_v = theirs.proj_k
    body = f"attend linformer(rank = {rank}, share = {share}, max_length = {longest})"
    ours = learner_of(body, SIZE)
    with torch.no_grad():
        ours.get_parameter("linformer_keys").copy_(theirs.proj_k.T)
        if share == "head":
            ours.get_parameter("linformer_values").copy_(theirs.proj_v.T)

    def attend(*given: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in given)
        theirs.to_q, theirs.to_k, theirs.to_v = (Given(x) for x in (q, k, v))
        found: Tensor = theirs(q)
        return found.view(2, n, heads, SIZE).transpose(1, 2)

    assert_same(ours, attend, tensors(2, heads, n, n))


class Given(torch.nn.Module):
    """Stands in place of a projection: whatever comes in, the given tensor comes out."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, states: Tensor) -> Tensor:
        return self.tensor


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("attend window(radius = 7)", {"exact_windowsize": True}),
        ("attend window(radius = 14)", {"exact_windowsize": True, "look_backward": 2}),
        ("causal attend window(before = 7, after = 0)", {"exact_windowsize": True, "causal": True}),
        ("attend block(size = 7, before = 1, after = 1)", {}),
        ("causal attend block(size = 7, before = 2, after = 0)", {"look_backward": 2}),
    ],
)
def test_windows_are_those_of_local_attention(body: str, options: dict[str, Any]) -> None:
    causal = body.startswith("causal")
    ahead = {} if causal else {"look_forward": options.get("look_backward", 1)}
    theirs = local_attention.LocalAttention(
        7, use_rotary_pos_emb=False, **{**ahead, **options, "causal": causal}
    )
    for n in (7, 42):
        assert_same(spec_of(body).compile(), theirs, tensors(2, 3, n, n))


def test_local_attention_pads_at_the_end() -> None:
    theirs = local_attention.LocalAttention(
        7, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True
    )
    n = 40
    q, k, v = given = tensors(2, 3, n, n)
    padding = torch.rand(2, n, generator=torch.Generator().manual_seed(0)) < 0.7
    padding[:, ::5] = True  # it gives rows without any key the mean of what lies near
    ours = spec_of("attend window(radius = 7)").compile()
    assert_same(
        lambda *_: ours(q, k, v, key_padding_mask=padding),
        lambda *_: theirs(q, k, v, mask=padding),
        given,
    )

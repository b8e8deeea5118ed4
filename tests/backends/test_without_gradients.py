"""Attention with a short side, and other ways to compute what nothing differentiates."""

from __future__ import annotations

import pytest
import torch

from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.low_rank import softmax
from attnspec.backends.factored.low_rank.linformer import projected
from attnspec.backends.factored.low_rank.mixing import LONG, fourier
from attnspec.backends.factored.low_rank.nystrom import along
from attnspec.backends.factored.low_rank.softmax import attend
from attnspec.ir.mechanisms.declaration import LANES
from attnspec.spec import parse


def numbers(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=source, dtype=torch.float64).to(kind)


def assert_near(found: torch.Tensor, meant: torch.Tensor) -> None:
    """To the roundings of float32, at the size of the largest number."""
    error = 2e-5 * max(1.0, meant.abs().max().item() if meant.numel() else 0.0)
    torch.testing.assert_close(found.double(), meant.double(), rtol=0, atol=error)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_transforms_look_at_is_seen() -> None:
    x = numbers(3, 4)
    assert unseen(x)
    assert not unseen(x.clone().requires_grad_())
    seen: list[bool] = []

    def looking(y: torch.Tensor) -> torch.Tensor:
        seen.append(unseen(y))
        return y * 2

    torch.func.vmap(looking)(x)
    torch.func.jvp(looking, (x,), (x,))
    assert seen == [False, False]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    scores = scale * q.double() @ k.double().transpose(-1, -2)
    return torch.softmax(scores, -1) @ v.double()


# --- attention with a short side -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 1), (1029, 33), (1, 1024), (256, 1025), (9000, 256)]
)
def test_few_keys_or_queries_are_attention(rows: int, columns: int) -> None:
    q, k, v = numbers(2, 4, rows, 6), numbers(2, 2, columns, 6), numbers(2, 2, columns, 5)
    q = 3 * q
    meant = written_out(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 0.3)
    assert_near(attend(q, k, v, 0.3), meant)


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k, v = 100 * numbers(1, 1, 1024, 4), 100 * numbers(1, 1, 8, 4), numbers(1, 1, 8, 4)
    for left, right, values in ((q, k, v), (k, q, q)):
        found = attend(left, right, values, 1.0)
        # weights of float32 scores of this size are sharp, their errors are those of the scores
        meant = written_out(left, right, values, 1.0)
        error = 0.05 * meant.abs().max().item()
        torch.testing.assert_close(found.double(), meant, rtol=0, atol=error)


def test_what_nothing_differentiates_keeps_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*given: object) -> torch.Tensor:
        raise AssertionError("weights were made")

    q, k = numbers(1, 2, 5, 4), numbers(1, 2, LANES, 4)
    meant = written_out(q, k, k, 0.3)
    for double in (False, True):
        kind = torch.float64 if double else torch.float32
        seen = attend(q.to(kind).clone().requires_grad_(), k.to(kind), k.to(kind), 0.3)
        assert_near(seen, meant)
    assert not attend(q, k[:, :, :0], k[:, :, :0], 0.3).any()
    monkeypatch.setattr(softmax, "weigh", unwanted)
    assert_near(attend(q, k, k, 0.3), meant)


# --- what is computed with them ------------------------------------------------------------------


def test_projections_of_all_heads_and_of_each() -> None:
    for heads in (1, 3):
        x, by = numbers(2, heads, 2500, 6), numbers(1, 20, 3000)
        meant = by.double()[:, :, :2500] @ x.double()
        assert_near(projected(x, by), meant)
        assert_near(projected(x.requires_grad_(), by), meant)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("n", [LONG, LONG + 1])
def test_transforms_by_channels(size: int, n: int) -> None:
    x = numbers(1, 2, n, size)
    meant = torch.fft.fft2(x.double()).real
    assert (fourier(x).double() - meant).abs().max() < 1e-5 * meant.abs().max()
    seen = fourier(x.requires_grad_())
    assert (seen.double() - meant).abs().max() < 1e-5 * meant.abs().max()


@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_one_head_is_convolved_as_many_are(n: int) -> None:
    x, kernels = numbers(1, 3, n, 4), numbers(3, 7)
    together = along(x, kernels)
    for head in range(3):
        one = along(x[:, head : head + 1], kernels[head : head + 1])
        assert_near(one, together[:, head : head + 1])


@pytest.mark.parametrize(
    "body",
    [
        "attend linformer(rank = 40, max_length = 3000)",
        "attend nystrom(landmarks = 32, conv = 9)",
        "attend favor(features = 96)",
        "causal attend favor(features = 96)",
        "causal attend taylor(order = 2)",
        "attend taylor(order = 2)",
        "causal attend linear()",
    ],
)
def test_long_sequences_without_gradients(body: str) -> None:
    module = parse(f"attention a {{ {body} }}").compile(head_size=16)
    q, k, v = (numbers(2, 2, 2100, 16) for _ in range(3))
    with torch.no_grad():
        found = module(q, k, v)
        meant = module.double()(q.double(), k.double(), v.double())
    module.float()
    assert (found.double() - meant).abs().max() < 2e-3 * meant.abs().max()
    # the same with gradients, and these
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(module(*leaves).square().sum(), leaves)
    others = torch.autograd.grad(module.double()(*wide).square().sum(), wide)
    for grad, other in zip(grads, others, strict=True):
        assert (grad.double() - other).abs().max() < 1e-2 * other.abs().max()

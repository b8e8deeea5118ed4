"""Nystroem attention: softmax through the means of segments, in memory linear in n.

out = softmax(s Q K~^T) Z (softmax(s Q~ K^T) V), where Z inverts A = softmax(s Q~ K~^T). Both outer
factors are attention themselves, with few keys and with few queries, so that no n x m matrix is
kept. Each matrix starts its iteration from its own norms, so that no sample depends on another; the
published codes take one maximum over the batch. Padding changes nothing: it is in no mean.
Source: Xiong et al. 2021, "Nystroemformer", section 3; equation 16 with the segment's own length.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh, widened
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.low_rank.segments import occupied, segment_means
from attnspec.backends.factored.low_rank.softmax import (
    MechanismKernel,
    attend,
    check_no_dropout,
    repeated,
    without_padding,
)
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.limits import LIMITS
from attnspec.lower.work import Call


class NystromKernel(MechanismKernel[Nystrom]):
    """Runs `nystrom`; learned part `kernel` [width] where it has a convolution."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        kept, declared = q.dtype, self.declared
        check_no_dropout("nystrom", call.dropout_p)
        q, k, v = widened(q), widened(k), widened(v)
        out = nystrom(q, k, v, declared.landmarks, declared.iterations, call.padding)
        if declared.conv:
            weights = call.tables["kernel"].to(v.dtype)
            values = repeated(without_padding(v, call.padding), q.shape[1])
            out = _with_convolution(out, values, weights)
        return out.to(kept)


def nystrom(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    landmarks: int,
    iterations: int,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """The approximation [B, H, n, d_v] for q [B, H, n, d], k [B, K, n, d] and v [B, K, n, d_v].

    `padding` is bool [B, n], True for a real position. Exact softmax with as many landmarks as
    positions; `iterations` 0 takes the exact pseudo-inverse.
    """
    scale = q.shape[3] ** -0.5
    if landmarks >= k.shape[2]:
        mask = None if padding is None else padding[:, None, None]
        return attend(q, k, v, scale, mask=mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "`nystrom` needs the queries of all positions, whose means are its landmarks; got"
            f" {q.shape[2]} of {k.shape[2]}"
        )
    q_marks, k_marks = _marks(q, k, landmarks, padding)
    inverse = pseudo_inverse(_middle(q_marks, k_marks), iterations)
    keys = None if padding is None else padding[:, None, None]
    values = inverse @ attend(q_marks, k, v, scale, mask=keys)
    mask = None
    if padding is not None:
        # where each landmark is a position, or empty, its value needs no inverse
        few = padding.sum(-1) <= landmarks
        own = repeated(segment_means(v, landmarks, padding), q.shape[1])
        values = torch.where(few[:, None, None, None], own, values)
        mask = occupied(padding, landmarks)[:, None, None]
    return attend(q, repeated(k_marks, q.shape[1]), values, scale, mask=mask)


def _marks(
    q: torch.Tensor, k: torch.Tensor, landmarks: int, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The landmarks of queries [B, H, m, d] and keys [B, K, m, d]."""
    return segment_means(q, landmarks, padding), segment_means(k, landmarks, padding)


def _middle(q_marks: torch.Tensor, k_marks: torch.Tensor) -> torch.Tensor:
    """A = softmax(s Q~ K~^T) [B, H, m, m]."""
    keys = repeated(k_marks, q_marks.shape[1])
    scores = (q_marks * q_marks.shape[3] ** -0.5) @ keys.transpose(-1, -2)
    return weigh(scores, None, "softmax")


def pseudo_inverse(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """The pseudo-inverse of matrices A [..., m, m] whose rows are distributions.

    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T / (|A|_1 |A|_inf), which converges
    with the third order; 0 stands for the singular value decomposition, in float64.
    """
    if iterations == 0:
        found: torch.Tensor = torch.linalg.pinv(matrix.double()).to(matrix.dtype)
        return found
    sizes = matrix.abs()
    bound = sizes.sum(-1).amax(-1) * sizes.sum(-2).amax(-1)
    z = matrix.transpose(-1, -2) / bound[..., None, None]
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ z
        z = 0.25 * z @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return z


def _with_convolution(out: torch.Tensor, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """out [B, H, n_q, d] plus the last rows of `along`; head by head in its place if nothing else
    sees it."""
    rows = out.shape[2]
    if not unseen(out, x, kernels):
        return out + along(x, kernels)[:, :, x.shape[2] - rows :]
    for head in range(out.shape[1]):
        at = slice(head, head + 1)
        out[:, at] += along(x[:, at], kernels[at if len(kernels) > 1 else slice(1)])[
            :, :, x.shape[2] - rows :
        ]
    return out


def along(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Each head of x [B, H, n, d] convolved along n with its kernel [H or 1, width], of odd width,
    zeros on both sides: out_i = sum_t kernel_t x_(i + t - width // 2).

    Some rows at a time are a product with a band matrix, several times as fast as torch's
    convolution of one channel a group.
    """
    batch, heads, n, size = x.shape
    width = kernels.shape[1]
    half = width // 2
    rows = min(LIMITS.convolved, n)
    x = functional.pad(x, (0, 0, half, half + -n % rows))
    windows = x.unfold(2, rows + width - 1, rows).transpose(-1, -2)
    # row r of the band holds the kernel from column r on
    band = functional.pad(kernels[:, None].expand(-1, rows, -1), (0, rows))
    band = band.reshape(len(kernels), -1)[:, : rows * (rows + width - 1)]
    band = band.view(len(kernels), 1, rows, rows + width - 1)
    if batch * heads == 1:
        # as one batch of matrices, so that the band is not copied for each
        found = torch.bmm(band[0].expand(windows.shape[2], -1, -1), windows[0, 0])
        return found.view(1, 1, -1, size)[:, :, :n]
    return (band @ windows).reshape(batch, heads, -1, size)[:, :, :n]

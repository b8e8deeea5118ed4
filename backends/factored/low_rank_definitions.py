"""Low-rank attention and the mixings as their papers write them: one head, position by position.

What verification and the tests compare with: the output [n_q, d_v] of q [n_q, d], k [n, d] and v
[n, d_v] of one head. Padding is left out of the sequence before anything else, and where a formula
has places of fixed meaning, it stands there as zeros. Memory and time are those of n x n matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.lower.work import Work

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class OneHead:
    """One head of a work: q [n_q, d], k [n, d] and v [n, d_v], the tensors that it has learned, and
    what is known of padding: bool [n], False there, or None where there is none."""

    work: Work
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    parts: Parts
    padding: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """Which positions are no padding, bool [n]."""
        if self.padding is None:
            return torch.ones(len(self.k), dtype=torch.bool)
        return self.padding

    @property
    def first(self) -> int:
        """The position of the first query."""
        return len(self.k) - len(self.q)


def linformer(of: OneHead) -> torch.Tensor:
    """softmax(Q (E K)^T / sqrt(d)) (F V)."""
    declared = cast(Linformer, of.work.mechanism)
    q, k, v, real = of.q, of.k, of.v, of.real
    n = len(k)
    if not real.any():
        return q.new_zeros(len(q), v.shape[1])
    if declared.projection in ("mean", "max"):
        cuts = segments(int(real.sum()), declared.rank)
        pool = _mean if declared.projection == "mean" else _max
        keys, values = pool(k[real], cuts), pool(v[real], cuts)
    else:
        maps = [of.parts["keys"], of.parts["values" if declared.apart else "keys"]]
        if declared.projection == "conv":
            maps = [_strided(kernel, n, real) for kernel in maps]
        keys, values = (by[:, :n][:, real] @ x[real] for by, x in zip(maps, (k, v), strict=True))
    return _softmax(q @ keys.T / math.sqrt(q.shape[1])) @ values


def _strided(kernel: torch.Tensor, n: int, real: torch.Tensor) -> torch.Tensor:
    """The matrix of a convolution whose stride is its width; rows without a real position go."""
    width = len(kernel)
    rows = []
    for start in range(0, n, width):
        stop = min(start + width, n)
        if real[start:stop].any():
            before, behind = kernel.new_zeros(start), kernel.new_zeros(n - stop)
            rows.append(torch.cat([before, kernel[: stop - start], behind]))
    return torch.stack(rows)


def nystrom(of: OneHead) -> torch.Tensor:
    """softmax(s Q K~^T) Z softmax(s Q~ K^T) V and the convolution of V."""
    declared = cast(Nystrom, of.work.mechanism)
    q, k, v, real = of.q, of.k, of.v, of.real
    n, scale = len(k), 1 / math.sqrt(q.shape[1])
    keys, values = k[real], v[real]
    if not real.any():
        return q.new_zeros(len(q), v.shape[1])
    if declared.landmarks >= len(keys):
        # each position is its own landmark, and the inverse undoes one of the factors
        out = _softmax(scale * q @ keys.T) @ values
    else:
        cuts = segments(len(keys), declared.landmarks)
        q_marks, k_marks = _mean(q[real], cuts), _mean(keys, cuts)
        left = _softmax(scale * q @ k_marks.T)
        right = _softmax(scale * q_marks @ keys.T)
        middle = _softmax(scale * q_marks @ k_marks.T)
        out = left @ inverse(middle, declared.iterations) @ right @ values
    if not declared.conv:
        return out
    half = declared.conv // 2
    edge = v.new_zeros(half, v.shape[1])
    held = torch.cat([edge, torch.where(real[:, None], v, 0.0), edge])
    for t in range(declared.conv):
        out = out + of.parts["kernel"][t] * held[t : t + n][of.first :]
    return out


def inverse(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Z of A [m, m] after so many iterations; the pseudo-inverse for 0."""
    if iterations == 0:
        exact: torch.Tensor = torch.linalg.pinv(matrix)
        return exact
    one = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    for _ in range(iterations):
        az = matrix @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def segments(n: int, count: int) -> list[range]:
    """n positions in `count` runs, the first count - n mod count of n // count, the others one
    more; in n runs of one where there are fewer."""
    count = min(n, count)
    sizes = [n // count + (index >= count - n % count) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _mean(x: torch.Tensor, cuts: list[range]) -> torch.Tensor:
    return torch.stack([x[cut.start : cut.stop].sum(0) / len(cut) for cut in cuts])


def _max(x: torch.Tensor, cuts: list[range]) -> torch.Tensor:
    return torch.stack([x[cut.start : cut.stop].amax(0) for cut in cuts])


def synthesizer(of: OneHead) -> torch.Tensor:
    """softmax(B) V."""
    declared = cast(Synthesizer, of.work.mechanism)
    q, k, parts = of.q, of.k, of.parts
    n, first = len(k), of.first
    match declared.kind:
        case "dense":
            hidden = torch.relu(q @ parts["hidden"].T + parts["hidden_bias"])
            logits = hidden @ parts["weight"].T + parts["bias"]
        case "random":
            logits = parts["logits"][first:n]
        case "factorized_random":
            logits = (parts["rows"] @ parts["columns"].T)[first:n]
        case _:
            short, long = declared.factors
            networks = zip(
                parts["hidden"],
                parts["hidden_bias"],
                torch.split(parts["weight"], [short, long]),
                torch.split(parts["bias"], [short, long]),
                strict=True,
            )
            a, b = (torch.relu(q @ w.T + c) @ x.T + y for w, c, x, y in networks)
            logits = a.repeat(1, long) * b.repeat_interleave(short, 1)
    logits = logits[:, :n]
    if declared.products:
        share = torch.sigmoid(parts["mix"])
        logits = (1 - share) * (q @ k.T) / math.sqrt(q.shape[1]) + share * logits
    held = of.real.expand(len(q), n)
    if of.work.causal:
        at = torch.arange(n)
        held = held & (at <= at[first:, None])
    some = held.any(1, keepdim=True)
    weights = torch.where(held, _softmax(logits.masked_fill(~held & some, -torch.inf)), 0.0)
    return weights @ of.v


def fourier(of: OneHead) -> torch.Tensor:
    """Re(F_n X F_d) = C_n X C_d - S_n X S_d with matrices of cosines and sines."""

    def angles(count: int) -> torch.Tensor:
        at = torch.arange(count, dtype=torch.float64)
        return 2 * math.pi * (at[:, None] * at % count) / count

    along, across = (angles(count) for count in of.v.shape)
    x = torch.where(of.real[:, None], of.v, 0.0)
    cosines = along.cos().to(x.dtype) @ x @ across.cos().to(x.dtype)
    out = cosines - along.sin().to(x.dtype) @ x @ across.sin().to(x.dtype)
    return out[of.first :]


def mixer(of: OneHead) -> torch.Tensor:
    """X + W_2 gelu(W_1 LayerNorm(X) + b_1) + b_2."""
    n, parts = len(of.v), of.parts
    x = torch.where(of.real[:, None], _normalised(of.v, parts), 0.0)
    hidden = parts["inner"][:, :n] @ x + parts["inner_bias"][:, None]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    out = of.v + parts["outer"][:n] @ hidden + parts["outer_bias"][:n, None]
    return out[of.first :]


def gmlp(of: OneHead) -> torch.Tensor:
    """Z_1 * (W LayerNorm(Z_2) + b), Z_1 = q and Z_2 = v."""
    n, parts = len(of.v), of.parts
    weight = parts["weight"][:n, :n]
    if of.work.causal:
        weight = torch.tril(weight)
    x = torch.where(of.real[:, None], _normalised(of.v, parts), 0.0)
    gate = weight @ x + parts["bias"][:n, None]
    return of.q * gate[of.first :]


def _normalised(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    middle = x.mean(1, keepdim=True)
    spread = (x - middle).square().mean(1, keepdim=True)
    return (x - middle) / torch.sqrt(spread + 1e-5) * parts["gain"] + parts["shift"]


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    return weights / weights.sum(1, keepdim=True)

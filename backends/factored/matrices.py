"""Mechanisms that are a few products of whole matrices: low ranks, and mixings of positions.

Linformer: queries attend to a fixed number of projected keys, softmax(Q (E K)^T / sqrt(d)) (F V).
Padding is projected as zeros; of pooled segments only those with a real position count.
Nystroem: softmax(s Q K~^T) Z (softmax(s Q~ K^T) V), where K~ and Q~ are means of segments and Z
inverts A = softmax(s Q~ K~^T). Both outer factors are attention themselves, so that no n x m matrix
is kept. Each matrix starts its iteration from its own norms, so that no sample depends on another.
Synthesizer: softmax over logits that no query and key are compared for. Those of `dense` and
`factorized_random` are products of two thin matrices, and need no n x n memory.
Mixings: positions are mixed by fixed or learned maps, whatever stands there. Their input are the
values, head by head, but for gMLP's gate, which multiplies the queries by what it makes of the
values. Padding counts as zeros.
Sources: Wang et al. 2020, "Linformer", section 4; Xiong et al. 2021, "Nystroemformer", section 3,
equation 16 with the segment's own length; Tay et al. 2021, "Synthesizer", section 3; Shen et al.
2021, "Efficient Attention"; Lee-Thorp et al. 2022, "FNet", section 3; Tolstikhin et al. 2021,
"MLP-Mixer", section 2; Liu et al. 2021, "Pay Attention to MLPs", section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh, widened
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.definitions import text_of
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.softmax import (
    attend,
    check_no_dropout,
    lower_triangle,
    occupied,
    repeated,
    segment_maxima,
    segment_means,
    without_padding,
)
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work, mechanism_of

Parts: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""q [B, H, n_q, d], k [B, K, n, d] and v [B, K, n, d_v] in the type of sums, in which the tables of
a call are, too; its padding is bool [B, n]."""


@dataclass(frozen=True, eq=False)
class MatrixKernel:
    """Runs a mechanism by its function in `MIXINGS`."""

    work: Work
    heads: tuple[int, ...]
    device: torch.device

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        declared = mechanism_of(self.work)
        mix, drops = MIXINGS[declared.name]
        if not drops:
            check_no_dropout(declared.name, call.dropout_p)
        parts = widened(q), widened(k), widened(v)
        learned = {name: table.to(parts[0].dtype) for name, table in call.tables.items()}
        return mix(self, parts, replace(call, tables=learned)).to(q.dtype)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The functions of the definition, where nothing is faster."""
        return text_of(self.work, 0)

    def named(self, tables: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is learned, as these functions call it."""
        name = mechanism_of(self.work).name
        return {f"{name}_{part}": x for part, x in tables.items()}

    def key_sums(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, at: torch.Tensor
    ) -> tuple[State, None]:
        """What keys and values at these positions add to the dense projections of Linformer,
        [B, heads, rank, d + d_v], of a call whose padding is theirs."""
        parts = widened(q), widened(k), widened(v)
        here = {name: x.index_select(2, at).to(parts[0].dtype) for name, x in call.tables.items()}
        keys_values = _projected(self, parts, replace(call, tables=here))
        return State(torch.cat(keys_values, 3)), None

    def onward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, before: State
    ) -> torch.Tensor:
        """The outputs of queries, where `before` has the projections of all positions."""
        keys, values = torch.split(before.sums, [k.shape[3], v.shape[3]], 3)
        scale = q.shape[3] ** -0.5
        return attend(widened(q), keys, values, scale, dropout_p=call.dropout_p).to(q.dtype)


def pairs_of(padding: torch.Tensor | None) -> torch.Tensor | None:
    """Padding as a mask of pairs, [B, 1, 1, n]."""
    return None if padding is None else padding[:, None, None]


# --- linformer -----------------------------------------------------------------------------------


def linformer(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Learned parts `keys`, and `values` unless they share the one projection."""
    (q, k, v), declared, padding = parts, cast(Linformer, kernel.work.mechanism), call.padding
    mask = None
    if declared.learned:
        k, v = _projected(kernel, parts, call)
        if declared.projection == "conv" and padding is not None:
            padded = functional.pad(padding, (0, -padding.shape[1] % declared.width))
            mask = torch.unflatten(padded, 1, (-1, declared.width)).any(-1)[:, None, None]
    else:
        pool = segment_means if declared.projection == "mean" else segment_maxima
        k, v = (pool(each, declared.rank, padding) for each in (k, v))
        if padding is not None:
            mask = occupied(padding, declared.rank)[:, None, None]
    return attend(q, k, v, q.shape[3] ** -0.5, mask=mask, dropout_p=call.dropout_p)


def _projected(kernel: MatrixKernel, parts: Parts, call: Call) -> list[torch.Tensor]:
    """E k and F v by the learned projections, of no padding."""
    (q, k, v), declared = parts, cast(Linformer, kernel.work.mechanism)
    by_keys = call.tables["keys"]
    by_values = call.tables["values"] if declared.apart else by_keys
    # heads with projections of their own read one key head each
    heads = q.shape[1] if len(by_keys) > 1 else k.shape[1]
    rows = (repeated(without_padding(x, call.padding), heads) for x in (k, v))
    project = convolved if declared.projection == "conv" else projected
    return [project(x, by) for x, by in zip(rows, (by_keys, by_values), strict=True)]


def projected(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """E x [B, H, rank, d] of x [B, H, n, d] and E [H or 1, rank, at least n]."""
    return by[:, :, : x.shape[2]] @ x


def convolved(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Products of a kernel [H or 1, width] with consecutive rows of x [B, H, n, d], as many as
    there are, zeros behind the last: [B, H, ceil(n / width), d]."""
    width = by.shape[1]
    behind = -x.shape[2] % width
    if behind:
        x = functional.pad(x, (0, 0, 0, behind))
    return (by[:, None, None] @ torch.unflatten(x, 2, (-1, width))).squeeze(3)


# --- nystrom -------------------------------------------------------------------------------------


def nystrom(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Learned part `kernel` [width] where it has a convolution; exact softmax with as many
    landmarks as positions."""
    out = _through_landmarks(kernel, parts, call.padding)
    if "kernel" not in call.tables:
        return out
    values = repeated(without_padding(parts[2], call.padding), out.shape[1])
    return _with_convolution(out, values, call.tables["kernel"])


def _through_landmarks(
    kernel: MatrixKernel, parts: Parts, padding: torch.Tensor | None
) -> torch.Tensor:
    count, real = cast(Nystrom, kernel.work.mechanism).landmarks, pairs_of(padding)
    q, k, v = parts
    scale = q.shape[3] ** -0.5
    if count >= k.shape[2]:
        return attend(q, k, v, scale, mask=real)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "`nystrom` needs the queries of all positions, whose means are its landmarks; got"
            f" {q.shape[2]} of {k.shape[2]}"
        )
    q_marks, k_marks = (segment_means(each, count, padding) for each in (q, k))
    keys = repeated(k_marks, q.shape[1])
    middle = weigh((q_marks * scale) @ keys.transpose(-1, -2), None, "softmax")
    values = kernel.text["inverse"](middle) @ attend(q_marks, k, v, scale, mask=real)
    mask = None
    if padding is not None:
        # where each landmark is a position, or empty, its value needs no inverse
        few = padding.sum(-1) <= count
        segments = repeated(segment_means(v, count, padding), q.shape[1])
        values = torch.where(few[:, None, None, None], segments, values)
        mask = occupied(padding, count)[:, None, None]
    return attend(q, keys, values, scale, mask=mask)


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
        product = torch.bmm(band[0].expand(windows.shape[2], -1, -1), windows[0, 0])
        return product.view(1, 1, -1, size)[:, :, :n]
    return (band @ windows).reshape(batch, heads, -1, size)[:, :, :n]


# --- synthesizer ---------------------------------------------------------------------------------


def synthesizer(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Over all pairs or the causal ones."""
    thin = cast(Synthesizer, kernel.work.mechanism).kind in ("dense", "factorized_random")
    return (_thin if thin else _full)(kernel, parts, call)


def _thin(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Attention over synthesised rows and columns."""
    (q, k, v), declared, learned = parts, cast(Synthesizer, kernel.work.mechanism), call.tables
    (batch, heads, n_q, size), n_k = q.shape, k.shape[2]
    if declared.kind == "dense":
        hidden = kernel.text["perceived"](q, learned["hidden"], learned["hidden_bias"])
        # the bias is the product with a hidden unit that is always 1
        rows = torch.cat([hidden, hidden.new_ones(batch, heads, n_q, 1)], 3)
        weight, bias = (learned[name][:, :n_k] for name in ("weight", "bias"))
        columns = torch.cat([weight, bias[..., None]], 2)
    else:
        rows = learned["rows"][:, n_k - n_q : n_k].expand(batch, heads, -1, -1)
        columns = learned["columns"][:, :n_k]
    columns = columns.expand(batch, heads, -1, -1)
    if declared.products:
        share = torch.sigmoid(learned["mix"])[..., None]
        rows = torch.cat([(1 - share) * size**-0.5 * q, share * rows], 3)
        columns = torch.cat([repeated(k, heads), columns], 3)
    values = repeated(v, heads)
    return attend(
        rows,
        columns,
        values,
        1.0,
        mask=pairs_of(call.padding),
        causal=kernel.work.causal,
        dropout_p=call.dropout_p,
    )


def _full(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Logits of all pairs."""
    (q, k, v), (heads, n_q, size) = parts, parts[0].shape[1:]
    logits = kernel.text["logits_of"](q, k.shape[2], kernel.named(call.tables))
    if cast(Synthesizer, kernel.work.mechanism).products:
        share = torch.sigmoid(call.tables["mix"])[..., None]
        scores = (q * size**-0.5) @ repeated(k, heads).transpose(-1, -2)
        logits = (1 - share) * scores + share * logits
    mask = pairs_of(call.padding)
    if kernel.work.causal:
        earlier = lower_triangle(n_q, k.shape[2], q.device)
        mask = earlier if mask is None else mask & earlier
    weights = weigh(logits, mask, "softmax")
    if call.dropout_p:
        weights = weights.expand(len(q), heads, -1, -1)
        weights = functional.dropout(weights, call.dropout_p)
    return weights @ repeated(v, heads)


# --- efficient attention, and mixings ------------------------------------------------------------


def efficient(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """By the definition, the query heads of a key head being more rows of one product."""
    q, k, v = parts
    rows = q.reshape(len(q), k.shape[1], -1, q.shape[3])
    out: torch.Tensor = kernel.text["mix"](rows, k, v, 0, call.padding, {})
    return out.view(*q.shape[:3], v.shape[3])


def defined(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """By the definition, with key heads for all query heads."""
    q, k, v = parts[0], *(repeated(x, parts[0].shape[1]) for x in parts[1:])
    out: torch.Tensor = kernel.text["mix"](q, k, v, 0, call.padding, kernel.named(call.tables))
    return out


def fourier(kernel: MatrixKernel, parts: Parts, call: Call) -> torch.Tensor:
    """Re(F_n V F_d)."""
    q, _, v = parts
    out = transformed(without_padding(v, call.padding))
    return repeated(out, q.shape[1])[:, :, -q.shape[2] :]


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Re(F_n X F_d) of x [..., n, d], the unnormalised transforms along both axes."""
    size = x.shape[-1]
    if x.shape[-2] >= LIMITS.transformed and unseen(x):
        out = x.new_empty(x.shape)
        for matrix, into in zip(x.flatten(0, -3), out.view(-1, *x.shape[-2:]), strict=True):
            _by_channels(matrix, into)
        return out
    half = torch.fft.fft(torch.fft.rfft(x, dim=-1), dim=-2).real
    # the other channels are the same numbers read backwards: position -i, channel -c
    rest = half[..., 1 : size - size // 2]
    rest = torch.cat([rest[..., :1, :], rest[..., 1:, :].flip(-2)], -2).flip(-1)
    return torch.cat([half, rest], -1)


def _by_channels(x: torch.Tensor, out: torch.Tensor) -> None:
    """The same of one matrix x [n, d], each channel transformed where it lies in one piece."""
    size = x.shape[1]
    half = torch.fft.fft(torch.fft.rfft(x, dim=1).T.contiguous()).real
    rest = half[1 : size - size // 2].flip(0)
    out[:, : len(half)] = half.T
    out[:1, len(half) :] = rest[:, :1].T
    out[1:, len(half) :] = rest[:, 1:].flip(1).T


MIXINGS: dict[str, tuple[Callable[[MatrixKernel, Parts, Call], torch.Tensor], bool]] = {
    "linformer": (linformer, True),
    "nystrom": (nystrom, False),
    "synthesizer": (synthesizer, True),
    "efficient": (efficient, False),
    "fourier": (fourier, False),
    "mixer": (defined, False),
    "gmlp": (defined, False),
}
"""What computes each mechanism, and whether it has weights to drop."""

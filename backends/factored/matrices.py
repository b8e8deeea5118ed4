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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh, widened
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored import text_of_matrices
from attnspec.backends.factored.definitions import text_of
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.softmax import attend, check_no_dropout, repeated
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work, mechanism_of

Parts: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""q [B, H, n_q, d], k [B, K, n, d] and v [B, K, n, d_v] in the type of sums, in which the tables of
a call are, too; its padding is bool [B, n]."""


@dataclass(frozen=True, eq=False)
class MatrixKernel:
    """Runs a mechanism by its function in `MIXINGS`."""

    work: Work
    heads: tuple[int, ...]
    device: torch.device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        declared = mechanism_of(self.work)
        mix, drops = MIXINGS[declared.name]
        if not drops:
            check_no_dropout(declared.name, call.dropout_p)
        parts = widened(q), widened(k), widened(v)
        learned = {name: table.to(parts[0].dtype) for name, table in call.tables.items()}
        return mix(self, parts, replace(call, tables=learned)).to(q.dtype)

    @property
    def runs_definition(self) -> bool:
        """Whether its formula is the text of the definition, so that comparing both shows faults of
        what stands in the place of single functions alone."""
        return getattr(self.work.mechanism, "kind", "") not in THIN

    @cached_property
    def text(self) -> dict[str, Any]:
        return text_for(self.work, 0.0, len(self.heads))

    def mixed(self, parts: Parts, call: Call) -> Tensor:
        """The output by the definition."""
        dropout_p, name = call.dropout_p, mechanism_of(self.work).name
        text = text_for(self.work, dropout_p, len(self.heads)) if dropout_p else self.text
        learned = {f"{name}_{part}": x for part, x in call.tables.items()}
        out: Tensor = text["mix"](*parts, 0, call.padding, learned)
        return out

    def key_sums(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, at: Tensor
    ) -> tuple[State, None]:
        """What keys and values at these positions add to the dense projections of Linformer,
        [B, heads, rank, d + d_v], of a call whose padding is theirs."""
        k, v = (
            self.text["without"](x, call.padding) for x in _beside(q, widened(k), widened(v), call)
        )
        here = {name: x.index_select(2, at).to(k.dtype) for name, x in call.tables.items()}
        by_values = here.get("values", here["keys"])
        return State(torch.cat([here["keys"] @ k, by_values @ v], 3)), None

    def onward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, before: State) -> Tensor:
        """The outputs of queries, where `before` has the projections of all positions."""
        keys, values = torch.split(before.sums, [k.shape[3], v.shape[3]], 3)
        scale = q.shape[3] ** -0.5
        return attend(widened(q), keys, values, scale, dropout_p=call.dropout_p).to(q.dtype)


def text_for(work: Work, dropout_p: float, heads: int) -> dict[str, Any]:
    """The functions of the definition for so many query heads, with faster ones in the place of
    some, which take fewer heads of keys and values."""
    landmarks = heads if mechanism_of(work).name == "nystrom" else 1

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return attend(q, k, v, scale, mask=mask, dropout_p=dropout_p)

    def by_logits(logits: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = weigh(logits, mask, "softmax")
        if dropout_p:
            weights = functional.dropout(weights.expand(*v.shape[:2], -1, -1), dropout_p)
        return weights @ v

    def means(x: Tensor, count: int, padding: Tensor | None) -> Tensor:
        of_keys: Any = text_of_matrices.means
        return repeated(of_keys(x, count, padding), max(landmarks, x.shape[1]))

    def with_convolution(out: Tensor, x: Tensor, kernels: Tensor) -> Tensor:
        x, late = repeated(x, max(len(kernels), x.shape[1])), slice(x.shape[2] - out.shape[2], None)
        into = torch.unflatten(out, 1, (x.shape[1], -1))
        if not unseen(out, x, kernels):
            return (into + along(x, kernels)[:, :, None, late]).flatten(1, 2)
        # head by head in its place
        for head in range(x.shape[1]):
            kernel = kernels[head % len(kernels)][None]
            into[:, head] += along(x[:, head : head + 1], kernel)[:, :, late]
        return out

    return text_of(
        work,
        0,
        attention=attention,
        by_logits=by_logits,
        means=means,
        with_convolution=with_convolution,
    )


def along(x: Tensor, kernels: Tensor) -> Tensor:
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


THIN = "dense", "factorized_random"
"""Synthesizers whose logits are products of two thin matrices."""

# --- synthesizer ---------------------------------------------------------------------------------


def synthesizer(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
    """Over all pairs or the causal ones."""
    thin = cast(Synthesizer, kernel.work.mechanism).kind in THIN
    return (_thin if thin else defined)(kernel, parts, call)


def _thin(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
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
        mask=None if call.padding is None else call.padding[:, None, None],
        causal=kernel.work.causal,
        dropout_p=call.dropout_p,
    )


# --- efficient attention, and mixings ------------------------------------------------------------


def efficient(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
    """By the definition, the query heads of a key head being more rows of one product."""
    q, k, v = parts
    rows = q.reshape(len(q), k.shape[1], -1, q.shape[3])
    return kernel.mixed((rows, k, v), call).view(*q.shape[:3], v.shape[3])


def linformer(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
    """By the definition."""
    return kernel.mixed((parts[0], *_beside(*parts, call)), call)


def _beside(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values; heads with projections of their own read one key head each."""
    heads = q.shape[1] if any(len(x) > 1 for x in call.tables.values()) else k.shape[1]
    return repeated(k, heads), repeated(v, heads)


def defined(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
    """By the definition, with key heads for all query heads."""
    q, k, v = parts
    return kernel.mixed((q, repeated(k, q.shape[1]), repeated(v, q.shape[1])), call)


def grouped(kernel: MatrixKernel, parts: Parts, call: Call) -> Tensor:
    """By the definition, whose functions take fewer key heads."""
    return repeated(kernel.mixed(parts, call), parts[0].shape[1])


MIXINGS: dict[str, tuple[Callable[[MatrixKernel, Parts, Call], Tensor], bool]] = {
    "linformer": (linformer, True),
    "nystrom": (grouped, False),
    "synthesizer": (synthesizer, True),
    "efficient": (efficient, False),
    "fourier": (grouped, False),
    "mixer": (defined, False),
    "gmlp": (defined, False),
}
"""What computes each mechanism, and whether it has weights to drop."""

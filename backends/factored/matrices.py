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

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.exact import grouped, repeated
from attnspec.backends.common.score_formula import widened
from attnspec.backends.factored.definitions import text_of
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.softmax import attend, by_scores, check_no_dropout
from attnspec.lower.work import Call, Work, mechanism_of

BY_KEY_HEAD = "linformer", "efficient"
"""Mechanisms in which the query heads of a key head are more rows of one product."""


@dataclass(frozen=True, eq=False)
class MatrixKernel:
    """Runs a mechanism by the text of its definition."""

    work: Work

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        name, shape = mechanism_of(self.work).name, (*q.shape[:3], v.shape[3])
        if name not in ("linformer", "synthesizer"):
            # which have weights to drop
            check_no_dropout(name, call.dropout_p)
        k, v = self._beside(q, k, v, call)
        rows = grouped(widened(q), k).flatten(2, 3)
        text = self._text(call.dropout_p) if call.dropout_p else self.text
        learned = {f"{name}_{part}": x.to(rows.dtype) for part, x in call.tables.items()}
        out: Tensor = text["mix"](rows, k, v, 0, call.padding, learned)
        return out.reshape(shape).to(q.dtype)

    def _text(self, dropout_p: float) -> dict[str, Any]:
        """The functions of the definition, with faster ones in the place of some."""
        by_logits, attention = (partial(x, dropout_p=dropout_p) for x in (by_scores, attend))
        return text_of(self.work, 0, by_logits=by_logits, attention=attention)

    @cached_property
    def text(self) -> dict[str, Any]:
        return self._text(0.0)

    def _beside(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Keys and values in the type of sums, for each query head where these differ."""
        own = mechanism_of(self.work).name not in BY_KEY_HEAD
        own = own or any(len(x) > 1 for x in call.tables.values())
        heads = q.shape[1] if own else k.shape[1]
        return repeated(widened(k), heads), repeated(widened(v), heads)

    def key_sums(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, at: Tensor
    ) -> tuple[State, None]:
        """What keys and values at these positions add to the dense projections of Linformer,
        [B, heads, rank, d + d_v], of a call whose padding is theirs."""
        k, v = (self.text["without"](x, call.padding) for x in self._beside(q, k, v, call))
        here = {name: x.index_select(2, at).to(k.dtype) for name, x in call.tables.items()}
        by_values = here.get("values", here["keys"])
        return State(torch.cat([here["keys"] @ k, by_values @ v], 3)), None

    def onward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, before: State) -> Tensor:
        """The outputs of queries, where `before` has the projections of all positions."""
        keys, values = torch.split(repeated(before.sums, q.shape[1]), [k.shape[3], v.shape[3]], 3)
        scale = q.shape[3] ** -0.5
        out = attend(widened(q), keys, values, None, scale, dropout_p=call.dropout_p)
        return out.to(q.dtype)

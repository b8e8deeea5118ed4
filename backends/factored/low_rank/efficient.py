"""Efficient attention: keys and values make global context vectors, which queries then mix.

Source: Shen et al. 2021, "Efficient Attention: Attention with Linear Complexities", section 3.
"""

from __future__ import annotations

import torch

from attnspec.backends.common.score_formula import widened
from attnspec.backends.factored.low_rank.mechanism_kernel import MechanismKernel
from attnspec.backends.factored.low_rank.softmax import check_no_dropout, without_padding
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.lower.work import Call


class EfficientKernel(MechanismKernel[Efficient]):
    """Runs `efficient`; padding is no key, and no position that is counted."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout("efficient", call.dropout_p)
        kept, padding = q.dtype, call.padding
        q, k, v = widened(q), widened(k), without_padding(widened(v), padding)
        batch, heads, rows, size = q.shape
        keys = k.shape[1]
        if self.declared.normalize == "scaling":
            count = k.new_tensor(k.shape[2]) if padding is None else padding.sum(-1)
            # all queries of a batch of padding alone read nothing
            k = k / count.clamp(min=1).to(k.dtype).view(-1, 1, 1, 1)
        else:
            q = torch.softmax(q, -1)
            if padding is not None:
                # a sample without keys has values of 0 alone
                k = k.masked_fill(~padding[:, None, :, None], torch.finfo(k.dtype).min)
            k = torch.softmax(k, 2)
        context = k.transpose(-1, -2) @ v
        out = q.reshape(batch, keys, heads // keys * rows, size) @ context
        return out.view(batch, heads, rows, v.shape[-1]).to(kept)

"""Some queries over some keys of a long sequence: a part of what a rank computes.

The part is laid out as one short sequence and computed by the kernel that the planner chooses for
it, so that its memory is that of tiles and its work that of its edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch.nn.functional import pad

from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.planner import AUTO, backend_of, choose
from attnspec.graphs.gathered import gathered
from attnspec.lower.work import (
    MERGED,
    Call,
    Kernel,
    Mergeable,
    Standing,
    Work,
    refusal_of,
)

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""

Partial = tuple[torch.Tensor, "torch.Tensor | None"]
"""An output [B, H, rows, d_v] and its log-sum-exps [B, H, rows], None for weights that are no
softmax."""


@dataclass(frozen=True, eq=False)
class Region:
    """Queries and keys by their positions in the whole sequence, int64 each; `work` is that of the
    heads at its whole length, `backend` the one that was asked for by name, or `auto`."""

    work: Work
    heads: tuple[int, ...]
    queries: np.ndarray
    keys: np.ndarray
    device: torch.device
    backend: str = AUTO

    @property
    def empty(self) -> bool:
        """Whether there is no query, or no key."""
        return not (len(self.queries) and len(self.keys))

    @cached_property
    def laid_out(self) -> Work:
        """The work of this part as one sequence; the zero logit of `softmax1` is added where parts
        are merged."""
        whole = self.work
        relation, n, count = gathered(whole.relation, whole.n_k, self.queries, self.keys)
        return replace(
            whole,
            relation=relation,
            n_q=count,
            n_k=n,
            normalize="softmax" if whole.normalize == "softmax1" else whole.normalize,
            standing=self._standing(n),
            copies=len(self.heads),
            device=self.device.type,
        )

    def _standing(self, n: int) -> Standing | None:
        """Where positions stand, if a score asks how far apart they are and they say it not."""
        if not self.work.needs_distance:
            return None
        moved = self.queries - np.arange(n - len(self.queries), n)
        if (moved == moved[0]).all() and (self.keys - np.arange(len(self.keys)) == moved[0]).all():
            return None
        keys = np.pad(self.keys, (0, n - len(self.keys)))
        return Standing(self.queries, keys, self.work.n_k)

    @cached_property
    def kernel(self) -> Kernel:
        """What runs it: the backend that was asked for, unless it refuses this part."""
        work, kind = self.laid_out, self.device.type
        name = self.backend
        if name != AUTO and refusal_of(backend_of(name), work, kind) is not None:
            name = AUTO
        # what outlives a call is not built in its modes
        return apart(lambda: choose(work, kind, name).build(work, self.heads, self.device))

    @cached_property
    def index(self) -> torch.Tensor:
        """The keys' positions."""
        return torch.from_numpy(self.keys).to(self.device)

    def partial(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Partial:
        """The output and its log-sum-exps of q [B, H, rows, d], k and v [B, H_kv, keys, …]. The
        call's padding and inputs are those of the whole sequence."""
        merges = self.work.normalize in MERGED
        if self.empty:
            out = q.new_zeros(*q.shape[:3], v.shape[-1])
            wide = torch.promote_types(q.dtype, torch.float32)
            return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide) if merges else None
        more, padding = self.laid_out.n_k - len(self.keys), call.padding
        if padding is not None:
            padding = pad(padding.index_select(1, self.index), (0, more))
        if more:
            k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
        mine = replace(call, padding=padding)
        if self.work.normalize == "softmax1":
            # outputs get the share of the zero logit before they are rounded
            q, k, v = widened(q), widened(k), widened(v)
        if not merges:
            return self.kernel(q, k, v, mine), None
        return cast(Mergeable, self.kernel).partial(q, k, v, mine)


def in_wide(parts: Parts) -> Parts:
    """q, k and v in float32 at least where they have gradients: those from several ranks add up."""
    q, k, v = (widened(x) if torch.is_grad_enabled() and x.requires_grad else x for x in parts)
    return q, k, v

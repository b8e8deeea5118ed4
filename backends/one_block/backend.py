"""Backends of one block of queries and keys: what cannot be laid out better is computed at once.

`dense` is the living definition: every score of every pair, masked. It runs every graph on every
device, differentiates to any order, exports, and takes n_q * n_k numbers per head. `torch` is
`scaled_dot_product_attention` with nothing, with `is_causal`, or with a mask that is kept: at the
lengths that most people train and serve with what one would write by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnspec.backends.one_block.row_keys import Form, form_of
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, Weighed, work_amounts
from attnspec.lower.work import (
    MERGED,
    Backend,
    Heads,
    Kernel,
    Work,
    Works,
    differ_in_pairs_alone,
    refusal_of,
)

if TYPE_CHECKING:
    import torch


class Dense(Weighed):
    """Scores of all pairs in one product."""

    name = "dense"
    takes_standing = True
    runs_decided = True
    takes_scores = "all"

    def refuses(self, work: Work, device: str) -> str | None:
        pairs = work.n_q * work.n_k
        if pairs > LIMITS.dense:
            return (
                f"at most {LIMITS.dense:,} pairs are computed one by one, and there are {pairs:,}"
            )
        return None

    def amounts(self, work: Work) -> Amounts:
        pairs = work.n_q * work.n_k
        return work_amounts("dense", work, call=1, pair=pairs, mask=pairs * bool(work.decided))

    def steps(self, work: Work) -> tuple[str, ...]:
        return (f"all {work.n_q:,} x {work.n_k:,} scores",)

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.one_block.dense import DenseKernel

        return DenseKernel(work, heads, device)


class TorchCall(Weighed):
    """One call of torch for all pairs."""

    name = "torch"
    runs_decided = True
    takes_scores = "static"

    def refuses(self, work: Work, device: str) -> str | None:
        if work.normalize not in MERGED:
            return f"it computes softmax weights, and the spec says `normalize {work.normalize}`"
        if work.changes.bends or work.changes.tables:
            return "it adds constants to scores, and `score` does more"
        if work.unit_keys:
            return "it scores keys as they are, not at unit length"
        for leaf in work.decided:
            if leaf.averages or not leaf.beside(vars(leaf)):
                return f"`{leaf.name}` changes more than pairs"
        pairs = work.n_q * work.n_k
        if pairs > LIMITS.mask_call and (work.changes or form_of(work) is Form.MASK):
            return f"a mask of at most {LIMITS.mask_call:,} pairs is kept, and there are {pairs:,}"
        return None

    def amounts(self, work: Work) -> Amounts:
        pairs, form = work.n_q * work.n_k, form_of(work)
        if form is Form.CAUSAL:
            pairs //= 2
        masked = pairs if form is Form.MASK or work.changes else 0
        made = pairs * bool(work.decided)
        return work_amounts("torch", work, call=1, pair=pairs, masked=masked, mask=made)

    def steps(self, work: Work) -> tuple[str, ...]:
        return (f"one call, {form_of(work).value}",)

    def joins(self, works: Sequence[Work]) -> bool:
        """Whether works of several heads that differ in their pairs alone are one call."""
        first = works[0]
        few = len(works) * first.n_q * first.n_k <= LIMITS.mask_call
        return few and not first.changes and differ_in_pairs_alone(works)

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        return self.build_joined([(work, heads)], device)

    def build_joined(self, groups: Works, device: torch.device) -> Kernel:
        """The kernel of several groups of heads, one after the other."""
        from attnspec.backends.one_block.torch_call import TorchCallKernel

        return TorchCallKernel(groups, device)


def definition_of(work: Work, device: str) -> Backend:
    """What computes all pairs of a work at least cost: torch's call, where it takes the work."""
    return Dense() if refusal_of(TorchCall(), work, device) else TorchCall()

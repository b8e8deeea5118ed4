"""Torch's own call, `scaled_dot_product_attention`: with nothing, with `is_causal`, or with a mask
that is kept.

At the lengths that most people train and serve with it is what one would write by hand, in one call
for all samples and heads. Padding at one end shortens the call, where a mask would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnspec.backends.torch_call.forms import Form, form_of
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, seconds_for, weighed
from attnspec.lower.work import MERGED, Alibi, Kernel, Work, differ_in_pairs_alone

if TYPE_CHECKING:
    import torch


class TorchCall:
    """One call of torch for all pairs."""

    name = "torch"
    runs_decided = True

    def refuses(self, work: Work, device: str) -> str | None:
        if work.normalize not in MERGED:
            return f"torch knows no `{work.normalize}`"
        others = [change for change in work.changes if not isinstance(change, Alibi)]
        if others:
            name = type(others[0]).__name__.lower()
            return f"torch's call adds constants to scores, and `{name}` is none"
        if work.unit_keys:
            return "torch's call scores keys as they are, not at unit length"
        for leaf in work.decided:
            if leaf.averages or not leaf.beside(vars(leaf)):
                return f"`{leaf.name}` changes more than pairs"
        pairs = work.n_q * work.n_k
        if pairs > LIMITS.mask_call and (work.changes or form_of(work) is Form.MASK):
            return f"a mask of at most {LIMITS.mask_call:,} pairs is kept, and there are {pairs:,}"
        return None

    def cost(self, work: Work) -> float:
        return seconds_for(self.amounts(work), work.device)

    def amounts(self, work: Work) -> Amounts:
        """What the work takes."""
        pairs, form = work.n_q * work.n_k, form_of(work)
        if form is Form.CAUSAL:
            pairs //= 2
        masked = pairs if form is Form.MASK or work.changes else 0
        units = {"call": 1, "pair": pairs, "masked": masked}
        return weighed("torch", units, work.device, work.copies)

    def steps(self, work: Work) -> tuple[str, ...]:
        return (f"one call, {form_of(work).value}",)

    def joins(self, works: Sequence[Work]) -> bool:
        """Whether works of several heads that differ in their pairs alone are one call."""
        first = works[0]
        numbers = len(works) * first.n_q * first.n_k
        plain = not first.changes and not any(work.reads or work.decided for work in works)
        return plain and numbers <= LIMITS.mask_call and differ_in_pairs_alone(works)

    def build_joined(
        self, groups: Sequence[tuple[Work, tuple[int, ...]]], device: torch.device
    ) -> Kernel:
        """The kernel of several groups of heads, one after the other."""
        from attnspec.backends.torch_call.kernel import JoinedCall

        return JoinedCall(groups, device)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.torch_call.kernel import TorchCallKernel

        return TorchCallKernel(work, heads, device, form_of(work))

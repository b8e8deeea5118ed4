"""Bands in orders: disjoint steps, each in the order of tokens in which its pairs are close.

A stride is a band once tokens are grouped by residue. Every step goes through torch's flash kernel
on the CPU, forward and backward, and results are merged exactly by their log-sum-exps. Graphs that
read run-time inputs are laid out anew for every sample's inputs. Under compilation, transforms and
dropout, where the flash kernel cannot go, tiles of the whole graph in natural order compute the
same, or for run-time inputs the dense definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnspec.layout.steps import aligned_layouts, bands_of, layouts_of, reading_seconds, seconds_of
from attnspec.limits import LIMITS
from attnspec.lower.cost_model import current, dense_seconds
from attnspec.lower.work import MERGED, Kernel, Softcap, Work, differ_in_pairs_alone

if TYPE_CHECKING:
    import torch


class BandsBackend:
    """Disjoint steps in residue orders, merged."""

    name = "bands"
    takes_standing = True

    @property
    def least(self) -> float:
        return current().bands_step

    def refuses(self, work: Work, device: str) -> str | None:
        if device != "cpu":
            return f"its kernel runs on the CPU, not on {device}"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        return None

    def cost(self, work: Work) -> float:
        if work.reads:
            # nothing is known before the inputs are; the kernel compares again for every sample
            return reading_seconds(work)
        bands = bands_of(work.relation, work.n_q, work.n_k)
        seconds = seconds_of(bands, work.n_q, work.copies)
        if any(isinstance(change, Softcap) for change in work.changes):
            # scores that are bent are computed one operation after the other
            pairs = sum(band.amounts["bands_pair"] for band in bands)
            seconds += pairs * current().dense_pair
        return seconds

    def steps(self, work: Work) -> tuple[str, ...]:
        if work.reads:
            return ("as the inputs of a call decide",)
        return tuple(str(band) for band in bands_of(work.relation, work.n_q, work.n_k))

    def joins(self, works: Sequence[Work]) -> bool:
        """Whether several heads differ in their pairs alone and take as many steps each, so that
        these can be computed together."""
        first = works[0]
        if first.reads or first.changes or not differ_in_pairs_alone(works):
            return False
        if len(works) * first.n_k > LIMITS.joined:
            return False
        relations = list(dict.fromkeys(work.relation for work in works))
        return aligned_layouts(relations, first.n_q, first.n_k) is not None

    def build_joined(
        self, groups: Sequence[tuple[Work, tuple[int, ...]]], device: torch.device
    ) -> Kernel:
        """The kernel of several groups of heads, one after the other."""
        from attnspec.backends.bands.kernel import JoinedSteps

        first = groups[0][0]
        found = aligned_layouts([work.relation for work, _ in groups], first.n_q, first.n_k)
        if found is None:
            raise ValueError("these heads are not joined")
        return JoinedSteps(groups, device, found)

    def cuts(self, work: Work) -> bool:
        """Whether kernels of fewer positions are cut from that of the work."""
        return True

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.bands.kernel import SteppedKernel

        if work.reads:
            from attnspec.backends.bands.per_sample import ReadingBands

            return ReadingBands(work, heads, device, dense_seconds(work))

        bands = bands_of(work.relation, work.n_q, work.n_k)
        return SteppedKernel(work, heads, device, layouts_of(bands, work.n_q, work.n_k))

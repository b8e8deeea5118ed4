"""`topk`: rows of queries score key blocks, and keep some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from attnspec.backends.common.remembered import table_of
from attnspec.backends.decided.block_scores import Part, Rows, Scores
from attnspec.backends.decided.choice import Choice, Given
from attnspec.backends.decided.lists import ListChoice, Pairs
from attnspec.backends.decided.ranking import (
    NONE,
    best,
    equally_long,
    listed,
    marked,
    prefix,
    ranks,
    softmax,
)
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS


@torch.no_grad()
def decide(leaf: TopK, given: Given) -> Choice:
    """The blocks that are taken, some rows at a time, which bounds the scores that are there."""
    chooser = Chooser(leaf, given)
    rows = chooser.rows
    found = [chooser.lists(part) for part in rows.parts(chooser.together)]
    # what is forced may be of single heads, whatever they share
    own = 1 if given.share == "all" else len(given.heads)
    heads = max([own, *(x.shape[1] for x in found)])
    none = torch.zeros(len(given.q), heads, 0, 0, dtype=torch.int64, device=given.q.device)
    padded = [x.expand(-1, heads, -1, -1) for x in equally_long([none, *found])]
    within = None if leaf.within is None else chooser.pairs(leaf.within)
    return ListChoice(torch.cat(padded, 2), **rows.places, within=within)


class Chooser:
    """Decides the lists of some rows at a time."""

    def __init__(self, leaf: TopK, given: Given) -> None:
        self.leaf, self.given = leaf, given
        # a score input has a row for each that there is, and no other
        self.rows = Rows(given, leaf.shared_by, leaf.block)
        self.scores: Scores | None = None
        if leaf.scorer:
            # a forced block may be seen in part, and its mass counts
            part = leaf.causal and leaf.mass is not None and leaf.block > 1
            self.scores = Scores(self.rows, leaf.scorer, part or leaf.within is not None)

    @property
    def together(self) -> int:
        """How many rows are decided together."""
        width = self.rows.blocks if self.scores is None else self.scores.width
        batch, heads = self.given.q.shape[:2]
        if self.leaf.within is not None or self.leaf.always is not None:
            width = max(width, self.rows.queries * self.rows.slots)
        return LIMITS.product // max(1, batch * heads * width)

    def pairs(self, graph: Relation) -> Pairs:
        return Pairs(graph, self.given.data, self.given.n_k)

    def lists(self, part: Part) -> Tensor:
        """The blocks of some rows, int64 [B, H or 1, rows, r], ascending, -1 for none."""
        leaf = self.leaf
        seen, some = self._seen(part)
        scales = table_of(self.given.scales, some.device).view(-1, 1, 1)
        scores = (
            self._given_scores(part) if self.scores is None else self.scores(part, seen, scales)
        )
        if not bool(some.all()):
            scores = scores.masked_fill(~some, -torch.inf)
        shared, forced = self._shared(scores), self._forced(part)
        if forced is not None:
            shared, forced = torch.broadcast_tensors(shared, forced)  # type: ignore[no-untyped-call]
        candidates = shared
        if leaf.causal and leaf.block > 1:
            candidates = shared.masked_fill(~self.rows.finished(part), -torch.inf)
        if leaf.above is not None:
            taken = candidates > leaf.above
            return listed(taken if forced is None else taken | forced)
        if leaf.mass is None:
            return best(candidates, forced, leaf.keys or leaf.blocks or 0)
        ranked = ranks(candidates, forced)
        if leaf.scorer == "mass":
            # what is forced may have no pair that is scored
            shares = shared.masked_fill((ranked == NONE) | (shared == -torch.inf), 0.0)
        else:
            # what an input says are logits already
            logits = self._shared(scores * scales) if self.scores is not None else shared
            shares = softmax(logits, ranked > NONE)
        return listed(prefix(ranked, shares, leaf.mass))

    def _seen(self, part: Part) -> tuple[Tensor | None, Tensor]:
        """Which slots rows see, bool [B, 1 or H, rows, slots], None where nothing asks for it; and
        in which blocks they see any, [B, 1 or H, rows, blocks]."""
        leaf, rows = self.leaf, self.rows
        if leaf.within is None and (self.scores is None or self.scores.pooled):
            return None, rows.visible(part, leaf.causal, blocks=True)
        seen = rows.visible(part, leaf.causal)
        if leaf.within is not None:
            seen = seen & self._any_pair(part, leaf.within)
        return seen, seen if rows.size == 1 else rows.in_blocks(seen).any(-1)

    def _given_scores(self, part: Part) -> Tensor:
        """The scores of an input for some rows, float32 [B, H or 1, rows, blocks]."""
        name = self.leaf.score.name  # type: ignore[union-attr]
        scores: Tensor = self.given.data[name]
        if scores.shape[2] < self.rows.count or scores.shape[3] < self.rows.blocks:
            raise ValueError(
                f"`{name}` must have a row for each of {self.rows.count} query blocks and a column"
                f" for each of {self.rows.blocks} key blocks, got the shape {list(scores.shape)}"
            )
        return scores[:, :, part.index, : self.rows.blocks].float()

    def _shared(self, scores: Tensor) -> Tensor:
        """The mean of scores over the heads that share it, [B, H or 1, rows, blocks]."""
        if self.given.share == "head" or scores.shape[1] == 1:
            return scores
        if self.given.share == "all":
            return scores.mean(1, keepdim=True)
        groups = torch.unflatten(scores, 1, (-1, self.given.ratio))
        return groups.mean(2, keepdim=True).expand_as(groups).flatten(1, 2)

    def _forced(self, part: Part) -> Tensor | None:
        """Which blocks are taken first, bool [B, 1 or H, rows, blocks]; None for none."""
        leaf = self.leaf
        if leaf.always is not None:
            forced = self._any_pair(part, leaf.always, cut=leaf.causal)
            forced = forced & self.rows.seen[:, None, None]
            return self.rows.in_blocks(forced).any(-1)
        if not leaf.causal or leaf.block == 1:
            return None
        block = (part.q_at - self.rows.start[:, None, None]) // leaf.block
        block = torch.where(part.own, block, -1).clamp_min(-1)
        return marked(block, self.rows.blocks)[:, None]

    def _any_pair(self, part: Part, graph: Relation, cut: bool = False) -> Tensor:
        """Which slots have a pair of a graph with a query of a row, bool [B, 1 or H, rows, slots];
        with `cut` one with k <= q."""
        n = self.given.n_k
        k_at = self.rows.at[:, None, None, None]
        inside, k_at = k_at < n, k_at.clamp_max(n - 1)
        q_at = part.q_at[:, None, ..., None]
        pairs = self.pairs(graph).holds(q_at, k_at) & inside & part.own[:, None, ..., None]
        if cut:
            pairs = pairs & (k_at <= q_at)
        return pairs.any(3)

"""Scores of key blocks for rows of queries: in float32, without gradient, not scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnspec.backends.decided.ranking import softmax
from attnspec.backends.decided.rows import Part, Rows

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores by one rule of the blocks of a call, rows after rows.

    `exact` says that blocks are seen in part, so that each row looks at the keys that it sees; else
    what a block is worth is found once for all rows.
    """

    rows: Rows
    scorer: str
    exact: bool
    keys: torch.Tensor
    pooled: tuple[torch.Tensor, ...]

    @staticmethod
    def of(rows: Rows, scorer: str, exact: bool) -> Scores:
        keys = rows.keys()
        if scorer == "bound":
            # 0 times an infinite key is 0: it bounds nothing
            keys = keys.clamp(-LARGEST, LARGEST)
        once = scorer in ("mean", "bound") and not exact
        pooled = _pooled(rows, keys, scorer) if once else ()
        return Scores(rows, scorer, exact, keys, pooled)

    @property
    def width(self) -> int:
        """Numbers of a row that are looked at together, for one head."""
        if self.scorer == "bound" and not self.pooled:
            return self.rows.slots * self.keys.shape[-1]
        return self.rows.blocks if self.pooled else self.rows.slots

    def __call__(self, part: Part, seen: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor:
        """[B, H, rows, blocks] for slots that rows see [B, 1 or H, rows, slots], None where it does
        not matter which; anything where they see none. `scales` [H, 1, 1] are those of a
        softmax."""
        q = self.rows.mean_query(part)
        if seen is not None:
            if self.scorer == "bound":
                return self._bound(q, seen)
            return self._of_keys(product(q, self.keys), seen, scales)
        if self.scorer == "bound":
            least, most = self.pooled
            return product(q.clamp_max(0), least) + product(q.clamp_min(0), most)
        return product(q, self.pooled[0])

    def _of_keys(
        self, scores: torch.Tensor, seen: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """From scores of keys [B, H, rows, slots] to those of blocks."""
        blocks, own = self.rows.in_blocks(scores), self.rows.in_blocks(seen)
        match self.scorer:
            case "dot":
                return scores
            case "max":
                return blocks.masked_fill(~own, -torch.inf).amax(-1)
            case "mean":
                return blocks.masked_fill(~own, 0.0).sum(-1) / own.sum(-1)
            case _:
                return self.rows.in_blocks(softmax(scores * scales, seen)).sum(-1)

    def _bound(self, q: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The sum over channels of max(q min k, q max k)."""
        groups = q.shape[1] // self.keys.shape[1]
        own = self.rows.in_blocks(seen)[..., None]
        heads = []
        for head in range(q.shape[1]):
            k = torch.unflatten(self.keys[:, head // groups], 1, (self.rows.blocks, self.rows.size))
            mine = own[:, head if own.shape[1] > 1 else 0]
            least = k[:, None].masked_fill(~mine, torch.inf).amin(3)
            most = k[:, None].masked_fill(~mine, -torch.inf).amax(3)
            at = q[:, head, :, None]
            heads.append(torch.maximum(at * least, at * most).sum(-1))
        return torch.stack(heads, 1)


def product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [B, H, rows, d] times k [B, H_kv, slots, d]: [B, H, rows, slots]."""
    batch, heads, rows, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, size)
    return (grouped @ k.transpose(-1, -2)).view(batch, heads, rows, k.shape[2])


def _pooled(rows: Rows, keys: torch.Tensor, scorer: str) -> tuple[torch.Tensor, ...]:
    """What stands for whole blocks [B, H_kv, blocks, d]: their mean, or least and greatest; no
    number or an infinite one where they hold no real key."""
    k = torch.unflatten(keys, 2, (rows.blocks, rows.size))
    real = torch.unflatten(rows.seen, 1, (rows.blocks, rows.size))[:, None, ..., None]
    if scorer == "mean":
        return (k.sum(3) / real.sum(3),)
    return k.masked_fill(~real, torch.inf).amin(3), k.masked_fill(~real, -torch.inf).amax(3)

"""Steps in torch on the CPU: every step through the flash kernel, merged by log-sum-exps.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from attnspec.backends.common.flash import flash, flash_backward
from attnspec.backends.common.masks import added_by, samples_of
from attnspec.backends.common.merging import merge, with_zero
from attnspec.backends.common.score_formula import HALF, widened
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.tables.blocks import Piece, Step
from attnspec.backends.tables.changed_scores import ScoreChanges, scored
from attnspec.backends.tables.sides import scratch
from attnspec.layout.tables import Tables, side_by_side
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache


class SteppedAttention:
    """Softmax attention over the tables of disjoint steps, on the CPU; with `one_more` logit 0 in
    every row for `softmax1`, and changed scores, if there are any."""

    def __init__(
        self,
        tables: Tables[np.ndarray],
        changes: ScoreChanges | None = None,
        one_more: bool = False,
    ) -> None:
        positions = np.arange(tables.n_k - tables.n_q, tables.n_k), np.arange(tables.n_k)
        if changes is not None:
            positions = changes.positions[0].numpy(), changes.positions[1].numpy()
        self.tables = tables
        self.steps = [Step(batches, tables.n_q, positions) for batches in tables.steps]
        self.changes, self.one_more = changes, one_more
        self._several: Cache[int, SteppedAttention] = Cache(LIMITS.paddings_laid_out)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, K, R, n_q, d], k and v [B, K, n_k, d], padding bool [B, n_k], learned tables
        [K R, buckets] -> the output like q and the log-sum-exps [B, K, R, n_q], -inf where a query
        has no key."""
        if self.one_more and q.dtype in HALF:
            # the share of the other keys is rounded once, with the output
            parts = widened(q), widened(k), widened(v)
            out, lse = self.forward(*parts, padding, scale, tables)
            return out.to(q.dtype), lse
        several = self._stacked(q, k, padding)
        if several is not None and padding is not None:
            parts = _as_one(q, QUERIES), _as_one(k, KEYS), _as_one(v, KEYS)
            found = several.forward(*parts, padding.reshape(1, -1), scale)
            out, lse = (_as_many(x, QUERIES, len(q)) for x in found)
            return out, lse
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = q.shape
        if self.steps and self.steps[0].complete:
            out, lse = q.new_empty(shape), q.new_empty(shape[:-1], dtype=wide)
        else:
            out, lse = q.new_zeros(shape), q.new_full(shape[:-1], -math.inf, dtype=wide)
        for some, real in self._parts(q, k, padding):
            mine = [x[some].flatten(0, 2) for x in (q, out, lse)]
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            scores = self._scores(some[1], q.shape[2], tables)
            self._forward_part((*mine, *keys), real, scale, scores)
        if self.one_more:
            return with_zero((out, lse), in_place=True)
        return out, lse

    def _stacked(
        self, q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None
    ) -> SteppedAttention | None:
        """What computes short samples of different padding in the calls of one sequence; None
        where they are computed together anyway, or one by one."""
        batch = len(q)
        if padding is None or self.changes is not None or not self.steps:
            return None
        if batch * k.shape[2:].numel() > LIMITS.heads_together or bool(
            (padding == padding[:1]).all()
        ):
            return None
        return self._of_several(batch)

    def _of_several(self, batch: int) -> SteppedAttention:
        """What computes so many samples as one sequence."""

        def build() -> SteppedAttention:
            return SteppedAttention(side_by_side([self.tables] * batch), None, self.one_more)

        return self._several.get(batch, lambda: apart(build))

    def _forward_part(
        self,
        tensors: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
        scores: ScoreChanges | None,
    ) -> None:
        """Some heads, q [c R, n_q, d], k and v [c, n_k, d], whose samples have the same padding
        [n_k]: fills in their output and log-sum-exps."""
        q, result, lse, k, v = tensors
        wide = lse.dtype
        out = self._summing(result, wide, "merged results")
        real = None if padding is None else added_by(padding, wide)
        for number, step in enumerate(self.steps):
            keys = step.keys_order(back=False)
            k_now, v_now = keys.take(k, "keys"), keys.take(v, "values")
            queries = step.q_order
            q_now = queries.take(q, "queries")
            # what is written for the first time need not be read before
            place = queries.room if step.complete and number == 0 else queries.take
            into = place(out, "result"), place(lse, "sums")
            for piece in step.pieces(len(q), q.shape[-1], False, scores is not None):
                bias, empty = piece.bias(real, wide)
                rows = (
                    piece.q.read(q_now, piece.to, "q"),
                    piece.k.read(k_now, piece.to, "k"),
                    piece.k.read(v_now, piece.to, "v"),
                )
                if scores is None or not scores.scores.bends:
                    bias = bias if scores is None else scores.added(piece, bias, wide)
                    found, sums = flash(*rows, 0.0, False, attn_mask=bias, scale=scale)
                else:
                    wider = [x.to(wide) for x in rows]
                    change = scores.of_piece(piece)
                    found, sums = scored(wider, bias, scale, change, scores.tables)
                if empty is not None:
                    sums = sums.masked_fill(empty, -math.inf)
                _put(into, piece, (found, sums), more=number > 0)
            queries.put(out, into[0])
            queries.put(lse, into[1])
        if out is not result:
            result.copy_(out)

    def _summing(self, x: torch.Tensor, wide: torch.dtype, use: str) -> torch.Tensor:
        """Where the shares of steps add up to x, which is zero at first: itself, or a wider buffer
        where several steps meet, so that a sum is rounded once."""
        if x.dtype == wide or len(self.steps) < 2:
            return x
        return scratch(use, tuple(x.shape), wide).zero_()

    def _scores(
        self, heads: slice, ratio: int, tables: Mapping[str, torch.Tensor] | None
    ) -> ScoreChanges | None:
        """The changes for the query heads of some key heads."""
        if self.changes is None:
            return None
        return self.changes.of(range(heads.start * ratio, heads.stop * ratio), tables or {})

    def _parts(
        self, q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None
    ) -> Iterator[tuple[tuple[slice, slice], torch.Tensor | None]]:
        """The samples and key heads that are computed together, and which keys are real, bool
        [n_k] or None: all samples of one padding, as many heads as there is room for; scores are
        changed sample by sample."""
        batch, heads, ratio = q.shape[:3]
        each = max(1, ratio * max(k.shape[2:].numel(), q.shape[3:].numel()))
        room = max(1, LIMITS.heads_together // each)
        for samples, real in samples_of(batch, padding, self.changes is not None):
            many = max(1, room // heads)
            for first in range(samples.start, samples.stop, many):
                some = slice(first, min(first + many, samples.stop))
                step = heads if many * heads <= room else min(heads, room)
                for low in range(0, heads, step):
                    yield (some, slice(low, min(low + step, heads))), real

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k and v, and of the tables if any of them asks; `saved` are q, k, v
        and what `forward` returned."""
        q, k, v, out, lse = saved
        several = self._stacked(q, k, padding)
        if several is not None and padding is not None:
            axes = QUERIES, KEYS, KEYS
            rows = [_as_one(x, QUERIES) for x in (grad, q, out, lse)]
            keys = [_as_one(x, KEYS) for x in (k, v)]
            given = (rows[1], *keys, *rows[2:])
            found = several.backward(rows[0], given, padding.reshape(1, -1), scale)
            grads = [_as_many(x, axis, len(q)) for x, axis in zip(found, axes, strict=True)]
            return tuple(grads)
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        wide = lse.dtype
        into = q.new_zeros(q.shape), *(x.new_zeros(x.shape, dtype=wide) for x in (k, v))
        grad_tables = {name: torch.zeros_like(table) for name, table in (tables or {}).items()}
        for some, real in self._parts(q, k, padding):
            rows = [x[some].flatten(0, 2) for x in (grad, q, out, lse)]
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            targets = [_flat(x[some], lead) for x, lead in zip(into, (3, 2, 2), strict=True)]
            scores = self._scores(some[1], q.shape[2], tables)
            self._backward_part((*rows, *keys), targets, real, scale, scores)
            for name, share in scores.grads.items() if scores is not None else ():
                grad_tables[name] += share
        return into[0], into[1].to(k.dtype), into[2].to(v.dtype), *grad_tables.values()

    def _backward_part(
        self,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
        scores: ScoreChanges | None,
    ) -> None:
        """Some heads: fills in the gradients of q, k and v, and adds up those of tables."""
        grad, q, out, lse, k, v = tensors
        of_q, *targets = into
        wide = lse.dtype
        grad_q = self._summing(of_q, wide, "sums of query gradients")
        real = None if padding is None else added_by(padding, wide)
        for step in self.steps:
            keys = step.keys_order(back=True)
            k_now, v_now = keys.take(k, "keys"), keys.take(v, "values")
            sums: Sequence[torch.Tensor] = targets
            if not keys.natural:
                uses = ("key gradients", "value gradients")
                sums = [scratch(use, tuple(k_now.shape), wide).zero_() for use in uses]
            # rows that are not there would add to the gradients of their keys
            queries = step.q_order
            rows = [queries.take(grad, "grad rows", blank=True)]
            for x, use in ((q, "q rows"), (out, "out rows"), (lse, "lse rows")):
                rows.append(queries.take(x, use))
            # with what earlier steps have added
            q_sums = queries.take(grad_q, "query gradients")
            for piece in step.pieces(len(q), q.shape[-1], True, scores is not None):
                parts = _piece_back(piece, rows, k_now, v_now, real, scale, scores)
                piece.q.add(q_sums, parts[0], piece.to)
                piece.k.add_overlapping(sums[0], parts[1], piece.to)
                piece.k.add_overlapping(sums[1], parts[2], piece.to)
            queries.put(grad_q, q_sums)
            if not keys.natural:
                for target, found in zip(targets, sums, strict=True):
                    keys.add(target, found)
        if grad_q is not of_q:
            of_q.copy_(grad_q)


QUERIES, KEYS = 3, 2
"""The axes of positions in tensors of queries, [B, K, R, n_q, …], and of keys, [B, K, n_k, …]."""


def _as_one(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Samples [B, K, …, n, …] with positions along an axis as one [1, K, …, B n, …]."""
    return x.movedim(0, axis - 1).flatten(axis - 1, axis)[None]


def _as_many(x: torch.Tensor, axis: int, batch: int) -> torch.Tensor:
    """One sample as the `batch` that it was made of."""
    return torch.unflatten(x[0], axis - 1, (batch, -1)).movedim(axis - 1, 0)


def _flat(x: torch.Tensor, lead: int) -> torch.Tensor:
    """A tensor to write to with its first dimensions as one."""
    return x.view(x.shape[:lead].numel(), *x.shape[lead:])


def _piece_back(
    piece: Piece,
    rows: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    padding: torch.Tensor | None,
    scale: float,
    scores: ScoreChanges | None,
) -> Sequence[torch.Tensor]:
    """The gradients of a piece's queries, keys and values; those of learned tables are added up."""
    grad, q, out, lse = rows
    bias, _ = piece.bias(padding, lse.dtype)
    given = [
        piece.q.read(grad, piece.to, "grad", blank=True),
        piece.q.read(q, piece.to, "q"),
        piece.k.read(k, piece.to, "k"),
        piece.k.read(v, piece.to, "v"),
        piece.q.read(out, piece.to, "out"),
        piece.q.read(lse, piece.to, "lse").contiguous(),
    ]
    if scores is not None and (scores.learned or scores.scores.bends):
        return scores.backward(given, bias, scale, scores.of_piece(piece))
    bias = bias if scores is None else scores.added(piece, bias, lse.dtype)
    grads: Sequence[torch.Tensor] = flash_backward(*given, 0.0, False, attn_mask=bias, scale=scale)
    return grads


def _put(
    into: tuple[torch.Tensor, torch.Tensor],
    piece: Piece,
    result: tuple[torch.Tensor, torch.Tensor],
    more: bool,
) -> None:
    """Put a piece's result into the output [c, n_q, d] and its log-sum-exps [c, n_q], or merge it
    with what is there where there is `more`."""
    out, lse = (piece.q.view(x, piece.to) for x in into)
    if not more:
        for x, y in zip(into, result, strict=True):
            piece.q.write(x, y, piece.to)
    elif out is not None and lse is not None:
        merge((out, lse), result)
    else:
        (rows, index), (sums, _) = (piece.q.rows_of(x, piece.to) for x in result)
        out, lse = (x.index_select(1, index) for x in into)
        merge((out, lse), (rows, sums))
        for x, y in zip(into, (out, lse), strict=True):
            x.index_copy_(1, index, y)

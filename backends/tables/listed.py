"""The tables of choices as steps, so that they are read as those of static graphs are.

An entry of a list is a query tile and a key tile that it reads. A tall query tile meets its key
tiles in one product. Where query tiles are low, gathering keys for each would move more numbers
than it computes: entries are sorted by key tile, and all query tiles that read it are the rows of
one product; each row's results are merged in one sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.merging import LOWEST, Partial
from attnspec.backends.decided.tables import Placed
from attnspec.backends.tables.blocks import (
    AS_THEY_LIE,
    LOG2E,
    Blocks,
    Order,
    Piece,
    Repeated,
    Step,
    scratch,
)
from attnspec.limits import LIMITS

LEVELS = 8
"""Levels of an octave: key tiles whose numbers of entries are on one are computed together, with as
many rows as the one that has most, which wastes a few percent."""


def listed_steps(
    layouts: Iterable[Placed], merges: bool, size: int, factors: list[Tensor] | None
) -> Iterator[ListedStep]:
    """The steps of layouts for numbers of a size, some query tiles after the others; `merges` as
    the first has it, and `factors` takes the gradients of the factors of entries [B, K, T, r]."""
    layouts = list(layouts)
    columns, first, total = [], 0, _total(layouts, size)
    for number, placed in enumerate(layouts):
        (count, tiles, width), height = placed.numbered.shape, placed.q.size * placed.repeat
        # the gradient of an entry's factor is that of its own keys and values
        tall = factors is not None or _is_tall(placed)
        each = max(1, count * (1 if tall else width) * height * size)
        if placed.masked is not None:
            each = max(each, count * height * width * placed.k.size // 4)
        # factors are counted by their places in all lists
        step = max(1, LIMITS.partials // each) if factors is None else tiles
        natural = placed.k.natural and placed.k.full
        order = AS_THEY_LIE if natural else Order(placed.k.rows().ravel())
        columns.append(np.full(placed.batch * placed.heads * placed.repeat * placed.n_q, total))
        for low in range(0, tiles, step):
            part = slice(low, min(low + step, tiles))
            again = merges or (number > 0 and not total)
            listed = ListedStep(placed, part, order, tall, again, factors)
            if total:
                own = listed.own.ravel()
                # tiles that read nothing have no results
                reads = (listed.tiles.reshape(-1, width) >= 0).any(1).repeat(height)
                places = np.flatnonzero((own >= 0) & reads)
                columns[-1][own[places]] = first + places
                listed.first, first = first, first + own.size
                spread = torch.from_numpy(np.stack(columns, 1)) if first == total else None
                listed.repeated = Repeated(np.arange(len(columns[-1])), spread, total)
            yield listed


def _is_tall(placed: Placed) -> bool:
    """Whether a query tile meets its key tiles in one product."""
    return placed.q.size * placed.repeat >= min(LIMITS.tall, placed.k.size)


def _total(layouts: Sequence[Placed], size: int) -> int:
    """How many results of several layouts are kept until they are merged at once; 0 where each
    layout is merged by itself."""
    if len(layouts) < 2 or len({placed.q.size for placed in layouts}) > 1:
        return 0
    total = sum(placed.lists[..., 0].numel() * placed.q.size * placed.repeat for placed in layouts)
    # a buffer that is not kept loses what is there; gradients may have one more column
    fits = (total + 1) * (size + 1) <= min(LIMITS.partials, LIMITS.buffer)
    return total if fits and all(map(_is_tall, layouts)) else 0


class ListedStep(Step):
    """Some query tiles of all lists of a layout, with entries int64 [N, T, r]."""

    first: int | None = None
    """The place of the first result of tall tiles among those of all layouts; None where results
    go where their queries lie."""

    def __init__(
        self,
        placed: Placed,
        part: slice,
        order: Order,
        tall: bool,
        merges: bool,
        factors: list[Tensor] | None,
    ) -> None:
        self.placed, self.tall, self.merges, self.k_order = placed, tall, merges, order
        lists = placed.numbered[:, part]
        if factors is not None:
            factors.append(torch.zeros(lists.shape, dtype=torch.float64, device="cpu"))
            self.weigh = partial(_weigh, factors[-1].view(-1))
        # the bytes of masks, and the pieces where these are kept
        self.nbytes, self.cut = 0, list[ListedPiece]()
        self.width = lists.shape[2]
        self.tiles = lists.flatten().numpy()
        self.own = rows = placed.q.rows(part)
        self.height = rows.shape[1]
        # with so few queries or keys in a block the flash kernel takes longer
        if min(self.height, placed.k.size) <= LIMITS.narrow:
            self.forward, self.backward = _forward, _backward
        # from behind those that are read and are none
        self.rows = np.concatenate([rows, np.minimum(rows, -1 - rows)[::-1]])
        there = lists.flatten(0, 1) >= 0
        masked = torch.zeros_like(there)
        if placed.masked is not None:
            masked = placed.masked[:, part].flatten(0, 1)
            masked = there & masked.any(1, keepdim=True) if tall else masked
        self.has_mask = masked.numpy().ravel()
        if self.has_mask.any():
            most = int(masked.sum(1).max())
            slots = torch.sort((~masked).to(torch.int8), dim=1, stable=True)[1][:, :most]
            # as many for each query tile: [T, h, most, w] of tall ones, else [T most, h, w]
            masks = placed.held(part.start, part.stop, slots).flatten(0, 1)
            masks = masks if tall else masks.transpose(1, 2).flatten(0, 1)
            # 0 for a pair and -1 for none
            self.masks = masks.view(torch.int8).sub(1) if masks.dtype == torch.bool else masks
            self.nbytes = self.masks.nbytes
            first = torch.arange(len(there), device="cpu")[:, None] * most
            self.place = (first + masked.cumsum(1) - 1).flatten()
        if tall:
            self.groups = [(each, 0) for each in self._by_queries(there.numpy())]
        else:
            self.groups, places = self._by_keys()
            at = places[:, None] * self.height + np.arange(self.height)[:, None]
            count = sum([each.size for each, _ in self.groups]) * self.height
            at = torch.from_numpy(np.where(places[:, None] < 0, count, at).reshape(-1, self.width))
            self.repeated = Repeated(rows.ravel(), at, count)

    def _by_queries(self, there: np.ndarray) -> Iterator[np.ndarray]:
        """The entries [G, C] of query tiles that have as many, with masks by themselves."""
        lengths = there.sum(1)
        kinds = 2 * lengths + self.has_mask.reshape(there.shape).any(1)
        for kind in np.unique(kinds[lengths > 0]).tolist():
            tiles = np.flatnonzero(kinds == kind)
            yield (tiles[:, None] * self.width + np.arange(self.width))[there[tiles]].reshape(
                len(tiles), -1
            )

    def _by_keys(self) -> tuple[list[tuple[np.ndarray, int]], np.ndarray]:
        """The entries [G, M] of key tiles that have about as many, -1 less one of the tile for
        none, with masks by themselves, with the number of the first of each group among all; and
        that of every entry [T, r], -1 for none."""
        entries = np.flatnonzero(self.tiles >= 0)
        keys, masked = self.tiles[entries], self.has_mask[entries]
        span = int(keys.max(initial=0)) + 1
        keys = keys + span * masked
        # short integers are sorted in a fraction of the time
        short = keys.astype(np.int16) if 2 * span < 1 << 15 else keys
        entries = entries[np.argsort(short, kind="stable")]
        counts = np.bincount(keys)
        starts, tiles = np.cumsum(counts) - counts, np.flatnonzero(counts)
        level = np.floor(np.log2(counts[tiles]) * LEVELS).astype(np.int64) * 2 + (tiles >= span)
        groups, places, first = [], np.full(len(self.tiles), -1), 0
        for each in np.unique(level):
            group = tiles[level == each]
            turns, count = np.arange(counts[group].max()), counts[group, None]
            some = entries[starts[group, None] + np.minimum(turns, count - 1)]
            some = np.where(turns < count, some, -1 - some)
            places[some[some >= 0]] = first + np.flatnonzero(some >= 0)
            groups.append((some, first))
            first += some.size
        return groups, places.reshape(-1, self.width)

    def pieces(self, heads: int, size: int, back: bool, scored: bool) -> Iterable[ListedPiece]:
        return self.cut or self.pieces_of(size)

    def pieces_of(self, size: int) -> Iterator[ListedPiece]:
        """The pieces of all groups, of so many scores as stay in the cache."""
        for entries, first in self.groups:
            count, many = entries.shape
            each = self.height * self.placed.k.size
            step = max(1, LIMITS.product // (each * many))
            if self.tall:
                step = max(1, min(step, LIMITS.piece // (self.placed.k.size * many * size)))
            high = many if self.tall or step > 1 else max(1, min(many, LIMITS.product // each))
            for low in range(0, count, step):
                for start in range(0, many, high):
                    some = entries[low : low + step, start : start + high]
                    # nothing reads what only fills up
                    if some[0, 0] >= 0:
                        yield ListedPiece(self, some, first + low * many + start)


class ListedPiece(Piece):
    """Some entries [G, M] of a step, those of a query tile or of a key tile in each row."""

    def __init__(self, step: ListedStep, entries: np.ndarray, first: int) -> None:
        self.step, self.entries, count = step, entries, len(entries)
        # a tall tile has a row of entries, a key tile the others
        tiles = (entries[:, :1] if step.tall else entries) // step.width
        self.q = self.into = Blocks(step.rows.take(tiles, 0).reshape(count, -1))
        keys = step.tiles[entries if step.tall else entries[:, :1]]
        self.k = Blocks(keys, step.placed.k.size)
        if step.first is not None:
            self.into = Blocks(tiles + step.first // step.height, step.height)
        elif not step.tall:
            # results of all entries lie one behind the other
            self.into = Blocks(np.arange(first, first + entries.size)[None], step.height)
            # these rows follow one another, which is known without a look at them
            self.into.lattice = 1, 1

    def bias(self, padding: Tensor | None, kind: torch.dtype) -> Tensor | None:
        step, (count, many) = self.step, self.entries.shape
        if not step.has_mask[self.entries[0, 0]]:
            return None
        first = self.entries[:, 0] // step.width
        if not step.tall:
            # any mask for rows that fill up
            places = step.place[torch.from_numpy(self.entries).clamp(min=0).flatten()]
            mask = step.masks.index_select(0, places.clamp_(min=0))
        elif first[-1] - first[0] == count - 1:
            mask = step.masks[first[0] : first[-1] + 1, :, :many]
        else:
            mask = step.masks[torch.from_numpy(first), :, :many]
        into = scratch("masks of scores", (count, 1, self.q.height, self.k.height), kind)
        if mask.dtype != torch.int8:
            into.view(mask.shape).copy_(mask)
            return into.clamp_(min=LOWEST)
        # bits as those of integers: to choose number by number takes up to ten times as long
        whole = into.view(torch.int32 if kind == torch.float32 else torch.int64)
        whole.view(mask.shape).copy_(mask)
        whole.bitwise_and_(torch.full((), LOWEST, dtype=kind, device="cpu").view(whole.dtype))
        return into

    def places(self, alike: bool) -> tuple[Tensor, Tensor, Tensor]:
        placed, order = self.step.placed, self.step.k_order
        q, k = (x.index.view(x.count, -1) for x in (self.q, self.k))
        k = order.blocks.index[k] if order.blocks else k
        heads = (q // placed.n_q) % (placed.heads * placed.repeat)
        return q % placed.n_q, k % placed.n_k, heads


def _weigh(into: Tensor, piece: Piece, keys: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Puts the gradients of the factors of a piece's entries where these stand."""
    entries = piece.entries  # type: ignore[attr-defined]
    products = [(x * y).sum(-1) for x, y in zip(shares, keys, strict=True)]
    each = (products[0] + products[1]).view(*entries.shape, -1).sum(-1)
    into[torch.from_numpy(entries)] = each.to(into.dtype)


def _forward(
    parts: Sequence[Tensor], bias: Tensor | None, scale: float, room: Sequence[Tensor] | None
) -> Partial:
    """The output [b, 1, h, e] and log-sum-exps [b, 1, h] of blocks' queries, keys and values, which
    the flash kernel computes, too; `bias` is written over. They are views of `room` [..., h, e]
    and [..., h], where there is some, or [b, 2, h]: then as `Repeated` takes them."""
    q, k, v = (x[:, 0] for x in parts)
    weights = _scores(q, k, bias, scale)
    blocks, height = q.shape[:2]
    if room is None:
        room = (
            scratch("output of products", (blocks, height, v.shape[2]), v.dtype),
            scratch("sums of products", (blocks, 1, height), v.dtype),
        )
    out = room[0].view(blocks, height, -1)
    sums = room[1].transpose(0, 1).view(-1, blocks, height, 1)
    raw = len(sums) == 2
    top = torch.amax(weights, -1, keepdim=True, out=sums[0])
    weights.sub_(top).exp2_()
    total = torch.sum(weights, -1, keepdim=True, out=sums[1] if raw else None)
    torch.bmm(weights, v, out=out)
    if not raw:
        out.mul_(total.reciprocal())
        top.add_(total.log2_()).mul_(1 / LOG2E)
    return out[:, None], room[1]


def _backward(
    parts: Sequence[Tensor], bias: Tensor | None, scale: float, room: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of blocks' queries, keys and values; `parts` are those of `flash_backward`, but
    for the output, in place of which stand its sums [b, 1, h, 1] times its gradient."""
    grad, q, k, v, delta, lse = (x[:, 0] for x in parts)
    weights = _scores(q, k, bias, scale).sub_((lse * LOG2E)[..., None]).exp2_()
    of_v = torch.bmm(weights.mT, grad, out=scratch("value shares", v.shape, v.dtype))
    of_scores = torch.bmm(grad, v.mT, out=scratch("score shares", weights.shape, v.dtype))
    of_scores.sub_(delta).mul_(weights)
    into = scratch("query shares", q.shape, q.dtype) if room is None else room[0].view(q.shape)
    of_q = _scaled(of_scores, k, scale, into)
    of_k = _scaled(of_scores.mT, q, scale, scratch("key shares", k.shape, k.dtype))
    return of_q[:, None], of_k[:, None], of_v[:, None]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The scores of blocks [b, h, w] in units of ln 2, in a buffer."""
    if bias is None:
        into = scratch("scores", (*q.shape[:2], k.shape[1]), q.dtype)
        return _scaled(q, k.mT, scale * LOG2E, into)
    return bias[:, 0].baddbmm_(q, k.mT, beta=LOG2E, alpha=scale * LOG2E)


def _scaled(x: Tensor, y: Tensor, scale: float, into: Tensor) -> Tensor:
    """The products of matrices times a scale."""
    return torch.baddbmm(into, x, y, beta=0, alpha=scale, out=into)

"""`lsh`: positions sorted by bucket and cut into chunks, round after round.

Near vectors fall into one bucket more often than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.decided.choice import Choice, TileLists, look_up
from attnspec.backends.decided.given import Given
from attnspec.backends.decided.labels import meeting
from attnspec.backends.decided.lists import TILE
from attnspec.backends.decided.ranking import in_order, reaches
from attnspec.graphs.counter_rng import HASHES, Stream, normals
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.limits import LIMITS
from attnspec.lower.cache import DRAWS, Cache

NOWHERE = -(1 << 30)
"""The chunk of padding."""


@dataclass(frozen=True, eq=False)
class Sorted:
    """Positions of one side in the order of their buckets, for each round.

    `bucket` and `chunk` are int64 [B, H or 1, R, n], padding in no chunk; `order` has the positions
    sorted by (bucket, position), padding last. Of two positions that may meet, `code` of the key is
    that of the query, or less by the chunks between them; of others it is not. It takes as few
    bytes as there are codes for.
    """

    bucket: Tensor
    chunk: Tensor
    code: Tensor
    order: Tensor

    @staticmethod
    def of(bucket: Tensor, real: Tensor, leaf: Lsh, n_k: int) -> Sorted:
        """The order of buckets [B, H or 1, R, n] of positions that are real or not, [B, n]."""
        n = bucket.shape[-1]
        apart = (~real)[:, None, None].expand_as(bucket)
        order = in_order(bucket, apart)
        along = bucket.gather(-1, order)
        place = torch.arange(n, device=bucket.device).expand_as(bucket)
        fresh = torch.ones_like(along, dtype=torch.bool)
        fresh[..., 1:] = along[..., 1:] != along[..., :-1]
        begin = torch.where(fresh, place, 0).cummax(-1).values
        inside = place - begin if leaf.cut == "bucket" else place
        chunk = (inside // leaf.chunk).masked_fill(apart.gather(-1, order), NOWHERE)
        back = torch.empty_like(order).scatter_(-1, order, chunk)
        if leaf.bucket_mask and _one_order(leaf):
            # numbered as they come, with a gap between buckets
            step = chunk.diff(dim=-1, prepend=chunk[..., :1]).clamp_min(0)
            along = torch.where(fresh, leaf.look + 1, step).cumsum(-1)
            code = torch.empty_like(order).scatter_(-1, order, along)
        else:
            wide = n_k // leaf.chunk + leaf.look + 2
            code = bucket * wide + back if leaf.bucket_mask else back
        return Sorted(bucket, back, _short(code, back), order)

    def round(self, turn: int) -> Sorted:
        """One round alone."""
        every = self.bucket, self.chunk, self.code, self.order
        bucket, chunk, code, order = (x[:, :, turn, None] for x in every)
        return Sorted(bucket, chunk, code, order)


def _short(code: Tensor, chunk: Tensor) -> Tensor:
    """Codes in as few bytes as they take, that of padding far below all others."""
    most = int(code.max()) if code.numel() else 0
    for kind in (torch.int16, torch.int32, torch.int64):
        far = (torch.iinfo(kind).max + 1) // 2
        if most < far or kind == torch.int64:
            break
    return torch.where(chunk == NOWHERE, -far, code).to(kind)


def _one_order(leaf: Lsh) -> bool:
    """Whether queries stand in the order of the keys."""
    return leaf.share_qk or leaf.given is not None


@dataclass(frozen=True, eq=False)
class LshChoice(Choice):
    """Pairs that share a bucket and lie near in its order, in some round.

    `alone` is bool [B, H or 1, n_q]: the queries that read themselves, having no other key; None
    where queries read themselves like any other key.
    """

    q: Sorted
    k: Sorted
    alone: Tensor | None
    leaf: Lsh
    n_k: int

    @property
    def n_q(self) -> int:
        return self.q.bucket.shape[-1]

    def _near(self, turn: int, q: Tensor, k: Tensor) -> Tensor:
        """Which pairs one round finds, without the rule of pairs with oneself."""
        code = look_up(self.q.code[:, :, turn], q - (self.n_k - self.n_q))
        other = look_up(self.k.code[:, :, turn], k)
        return reaches(code, other, self.leaf.look)

    def _may_read(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether a pair is of two positions, or of one that reads itself."""
        if self.alone is None:
            return torch.ones_like(k, dtype=torch.bool)
        # one comparison of pairs: a query that reads itself is not a key's position
        at = look_up(self.alone, q - (self.n_k - self.n_q))
        return torch.where(at, -1, q).int() != k.int()

    def _each(self, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        return (self._near(turn, q, k) for turn in range(self.turns))

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(torch.logical_or, self._each(q, k)) & self._may_read(q, k)

    @property
    def turns(self) -> int:
        """How many rounds there are."""
        return self.k.bucket.shape[2]

    @property
    def counted(self) -> bool:
        return self.leaf.multiplicity and self.leaf.combine != "mean"

    def counts(self, q: Tensor, k: Tensor) -> Tensor:
        none = torch.zeros((), dtype=torch.int64, device=k.device)
        return reduce(torch.add, self._each(q, k), none) * self._may_read(q, k)

    def rounds(self) -> tuple[Choice, ...]:
        if self.leaf.combine != "mean":
            return ()
        return tuple(
            replace(self, q=self.q.round(turn), k=self.k.round(turn)) for turn in range(self.turns)
        )

    def layouts(self) -> tuple[TileLists, ...]:
        """One layout a round: tiles of whole chunks of the sorted order."""
        return tuple(self.layout(turn) for turn in range(self.turns))

    def layout(self, turn: int) -> TileLists:
        """The tiles of the order of one round, and the pairs that it is the first to find."""
        tile = self.leaf.chunk * max(1, TILE // self.leaf.chunk)
        orders = []
        for side, count in ((self.q, self.n_q), (self.k, self.n_k)):
            order = side.order[:, :, turn]
            # of queries that are the last keys the order has all keys
            position = order + (self.n_k - order.shape[-1])
            gone = position < self.n_k - count
            inside = (position - (self.n_k - count)).clamp_min(0)
            place = side.chunk[:, :, turn].gather(-1, inside)
            orders.append(torch.where(gone | (place == NOWHERE), -1, position))
        lists = self._lists(turn, tile)
        return TileLists(orders[0], orders[1], tile, tile, lists, partial(self._first, turn))

    def _lists(self, turn: int, tile: int) -> Tensor:
        """The key tiles of each query tile [B, H or 1, query tiles, r]."""
        chunk, look = self.leaf.chunk, self.leaf.look
        if self.leaf.cut == "bucket" and not _one_order(self.leaf):
            # all key tiles of the buckets of a tile
            q, k = (x.bucket[:, :, turn].gather(-1, x.order[:, :, turn]) for x in (self.q, self.k))
            return meeting(q, k, tile)
        tiles, others = (-(-side.order.shape[-1] // tile) for side in (self.q, self.k))
        first = torch.arange(tiles, device=self.q.order.device)[:, None]
        reach = look * chunk if self.leaf.cut == "order" else (look + 1) * chunk - 1
        behind = -(-reach // tile)
        ahead = 0 if self.leaf.cut == "order" else 1
        lists = first + torch.arange(-behind, ahead + 1, device=first.device)
        lists = torch.where((lists >= 0) & (lists < others), lists, -1)
        return lists[None, None]

    def _first(self, turn: int, q: Tensor, k: Tensor) -> Tensor:
        """The pairs that a round finds and none before it: of those with oneself, which every
        round finds, only the first one need be asked."""
        pairs = self._near(turn, q, k)
        if not turn:
            pairs = pairs & self._may_read(q, k)
        for before in range(turn):
            # held and not near, in one step
            pairs = pairs > self._near(before, q, k)
        return pairs

    @property
    def lists(self) -> Mapping[str, Tensor]:
        return {"buckets": self.k.bucket, "chunks": self.k.chunk.clamp_min(-1)}


@torch.no_grad()
def decide(leaf: Lsh, given: Given) -> Choice:
    """The buckets of all positions; raises ValueError if keys must be the queries, and are not."""
    if leaf.share_qk:
        _require_shared(given)
    if leaf.given is None:
        count = leaf.buckets_at(given.n_k)
        bucket = buckets_of(leaf, given.keys_by_head, given.heads, count)
    else:
        name = leaf.given.name  # type: ignore[attr-defined]
        bucket = given.data[name].to(torch.int64)
        if not bucket.shape[2]:
            raise ValueError(
                f"`{name}` must have 1 round or more, on axis 2, got {list(bucket.shape)}"
            )
    k = Sorted.of(bucket, given.real, leaf, given.n_k)
    # the last positions alone; orders are those of all
    bucket, chunk, code = (x[..., -given.n_q :] for x in (k.bucket, k.chunk, k.code))
    q = Sorted(bucket, chunk, code, k.order)
    if not _one_order(leaf):
        bucket = buckets_of(leaf, given.q, given.heads, count)
        q = Sorted.of(bucket, given.real[:, given.first_query :], leaf, given.n_k)
    alone = None
    if leaf.share_qk:
        alone = ~has_other(k, leaf)[..., -given.n_q :]
    return LshChoice(q, k, alone, leaf, given.n_k)


def _require_shared(given: Given) -> None:
    if given.k.shape[1] != given.q.shape[1] or given.grouped:
        raise ValueError(
            "`lsh` hashes keys that are the queries, so that k has as many heads as q, got"
            f" {given.q.shape[1]} and {given.k.shape[1]}: `share_qk = false` hashes both"
        )
    shared_keys = given.k[:, :, given.first_query :]
    if shared_keys.is_cpu and shared_keys.is_set_to(given.q):
        return
    # what is not a number is alike in both
    alike = (shared_keys == given.q) | (shared_keys != shared_keys) & (given.q != given.q)
    if not bool(alike.all()):
        raise ValueError(
            "`lsh` hashes keys that are the queries, and k is not q, or has not q as its last rows:"
            " call it with k = q, or write `lsh(share_qk = false)`"
        )


def has_other(side: Sorted, leaf: Lsh) -> Tensor:
    """Which positions find a key that is another one in some round, bool [B, H or 1, n]."""
    chunk = side.chunk.gather(-1, side.order)
    other = _near(side, leaf) if leaf.bucket_mask else _in_chunks(side, chunk, leaf)
    other = other & (chunk != NOWHERE)
    return torch.zeros_like(other).scatter_(-1, side.order, other).any(2)


def _near(side: Sorted, leaf: Lsh) -> Tensor:
    """In the sorted order: whether a neighbour is of the same bucket, and near."""
    code = side.code.gather(-1, side.order)
    near = torch.zeros_like(code, dtype=torch.bool)
    # those before it in its bucket are earlier positions
    near[..., 1:] = reaches(code[..., 1:], code[..., :-1], leaf.look)
    if not leaf.causal:
        near[..., :-1] |= code[..., 1:] == code[..., :-1]
    return near


def _in_chunks(side: Sorted, chunk: Tensor, leaf: Lsh) -> Tensor:
    """In the sorted order: whether the chunks that are examined have another key."""
    n = chunk.shape[-1]
    counted = -(-n // leaf.chunk)
    chunks = chunk.clamp_min(0)
    late = torch.full_like(chunk[..., :1], n).expand(*chunk.shape[:-1], counted)
    real = chunk != NOWHERE
    first = late.scatter_reduce(-1, chunks, torch.where(real, side.order, n), "amin")
    many = torch.zeros_like(late).scatter_add_(-1, chunks, real.to(late.dtype))
    for _ in range(min(leaf.look, counted)):
        first[..., 1:] = torch.minimum(first[..., 1:], first[..., :-1].clone())
        many[..., 1:] = torch.maximum(many[..., 1:], 2 * (many[..., :-1] > 0).to(many.dtype))
    if leaf.causal:
        return first.gather(-1, chunks) < side.order
    return many.gather(-1, chunks) > 1


# --- hashes --------------------------------------------------------------------------------------

Wanted: TypeAlias = "tuple[int, int, tuple[int, ...], int, int, int]"
"""Seed, layer, heads, rounds, size of a head, columns."""

_kept: Cache[tuple[Wanted, str], Tensor] = Cache(LIMITS.draws, DRAWS)


def rotations(wanted: Wanted, device: torch.device) -> Tensor:
    """Gaussian numbers float32 [heads, rounds, columns, size]: place i of the vectors of round r is
    row r * size + i of the stream of its layer and head."""

    def build() -> Tensor:
        seed, layer, heads, rounds, size, columns = wanted
        rows = np.arange(rounds * size)
        streams = (Stream(seed, HASHES, layer, head) for head in heads)
        matrices = np.stack([normals(each, rows, columns) for each in streams]).reshape(
            len(heads), rounds, size, columns
        )
        return torch.from_numpy(matrices).transpose(2, 3).to(device, torch.float32).contiguous()

    key = wanted, str(device)
    drawn = _kept.kept.get(key)
    return _kept.get(key, lambda: apart(build)) if drawn is None else drawn


def buckets_of(leaf: Lsh, x: Tensor, heads: tuple[int, ...], count: int) -> Tensor:
    """The bucket of every vector of x [B, H, n, d] in every round, int64 [B, H, rounds, n]; ties go
    to the lower bucket."""
    batch, _, n, size = x.shape
    columns = count.bit_length() - 1 if leaf.hash == "hyperplanes" else count // 2
    drawn = rotations((leaf.seed, leaf.layer, heads, leaf.rounds, size, columns), x.device)
    turns = min(leaf.rounds, max(1, LIMITS.columns // max(1, columns)))
    together = max(1, LIMITS.product // max(1, turns * columns))
    buckets = x.new_empty(batch, len(heads), leaf.rounds, n, dtype=torch.int64)
    room = x.new_empty(min(n, together) * turns * columns, dtype=torch.float32)
    parts = product(range(batch), range(len(heads)), range(0, leaf.rounds, turns))
    for sample, head, first in parts:
        some = drawn[head, first : first + turns]
        sides = some.flatten(0, 1)
        for low in range(0, n, together):
            rows = x[sample, head, low : low + together].float()
            y = room[: len(rows) * len(sides)].view(-1, len(rows))
            # forward mode takes no `out`
            y = torch.mm(sides, rows.T, out=None if is_transformed() else y)
            y = y.view(*some.shape[:2], -1)
            mine = _side(y) if leaf.hash == "hyperplanes" else farthest(y)
            buckets[sample, head, first : first + turns, low : low + together] = mine
    return buckets


def _side(y: Tensor) -> Tensor:
    """Of which sides of planes the columns of y [rounds, c, m] are, as the bits of one number."""
    return ((y > 0) * 2 ** torch.arange(y.shape[1], device=y.device)[:, None]).sum(1)


def farthest(y: Tensor) -> Tensor:
    """argmax([y; -y]) of each column of y [rounds, c, m], the first of several, 0 where a number is
    none; y is written over."""
    top, most = _first_greatest(y)
    bottom, least = _first_greatest(y.neg_())
    code = torch.where(top >= bottom, most, least + y.shape[1])
    return code.masked_fill_(top.isnan(), 0)


def _first_greatest(y: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest number of each column of y [rounds, c, m], and where it first stands."""
    if not y.is_cpu:
        return y.max(1)
    # pooling over channels that lie together is torch's one search for a place in vectors: a
    # seventh of the time
    images = y[:, :, None].permute(0, 3, 1, 2)
    greatest = torch.ops.aten.max_pool2d_with_indices(images, [y.shape[1], 1])
    top, most = (x.flatten(1) for x in greatest)
    return top, most
